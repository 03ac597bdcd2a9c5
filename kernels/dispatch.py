"""Which implementation of each operation runs, and a record of what did.

Promises: the choice is a pure function of device, dtype, sizes, softcap and an override; what a request
asks for and no implementation honours is refused by name, never done another way in silence. Nothing else
calls attention. The torch definitions in the sibling modules say what is computed; they run on every host,
in fp32 and at sizes that the kernels do not take. The record is for the whole process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import attention as attention_kernels
from kernels import mh_moe, mhc, qk_norm_rope, swiglu7
from kernels import rms_norm as rms_norm_definition

_ran: defaultdict[str, set[str]] = defaultdict(set)


# Distributions of the flash-attn family by version. This release calls none of them: whether one is installed
# changes what a refusal says, never what runs.
FLASH_PACKAGES = {2: "flash-attn", 3: "fa3-fwd", 4: "flash-attn-4"}


class AttentionSetting(NamedTuple):
    """All that decides which attention runs.

    Args:
        device_type, dtype, head_dim, softcap: Of the call; 0 or less means no softcap.
        capability: None off CUDA.
        flash_attn_version: Insisted on.
        packages: Those of `FLASH_PACKAGES` that are installed.
    """

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    softcap: float
    flash_attn_version: int | None = None
    packages: tuple[str, ...] = ()


class FusedSetting(NamedTuple):
    """What decides whether a fused kernel runs; `triton` is its installed version or None."""

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    triton: str | None


def choose_tokenwise(setting: FusedSetting) -> str:
    """Name what runs operations that see one token at a time: `triton` or `torch`.

    Measured and tested on capability 9.0; from 8.0 on nothing in them is special to it.
    """
    is_able = setting.capability is not None and setting.capability >= (8, 0)
    fits = setting.device_type == "cuda" and setting.dtype == torch.bfloat16 and setting.triton is not None
    return "triton" if is_able and fits else "torch"


def choose_streams(setting: FusedSetting, num_streams: int, width: int) -> str:
    """Name what runs hyper-connections."""
    return choose_tokenwise(setting) if num_streams == 4 and width % 64 == 0 else "torch"


def choose_route(setting: FusedSetting, num_experts: int, width: int, top_k: int) -> str:
    """Name what chooses experts; its tiles fill the shared memory of capability 9.0 and are for it alone."""
    fits = 8 <= num_experts <= 256 and _is_power_of_two(num_experts) and width % 64 == 0 and top_k <= 8
    return choose_tokenwise(setting) if fits and setting.capability == (9, 0) else "torch"


def choose_experts(setting: FusedSetting, width: int, width_inner: int) -> str:
    """Name what runs routed experts: `hopper`, `triton` (both for capability 9.0 alone) or `torch`."""
    if choose_tokenwise(setting) == "torch" or setting.capability != (9, 0):
        return "torch"
    # Written in Gluon, whose interface is experimental: only the version that it was tested with.
    if width == 256 and width_inner % 64 == 0 and (setting.triton or "").startswith("3.6."):
        return "hopper"
    return "triton" if width in (64, 128, 256) and width_inner % 32 == 0 else "torch"


def attention_setting(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float,
    *,
    flash_attn_version: int | None = None,
) -> AttentionSetting:
    """Return the setting of this host's device and packages."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    packages = tuple(name for name in FLASH_PACKAGES.values() if _version_of(name) is not None)
    return AttentionSetting(device.type, capability, dtype, head_dim, softcap, flash_attn_version, packages)


def choose_attention(setting: AttentionSetting) -> str:
    """Name the attention that runs for a setting.

    Raises:
        ValueError: The flash attention version that was asked for cannot run here.
    """
    version = setting.flash_attn_version
    if version is not None and not _honours(version, setting):
        raise ValueError(
            f"flash attention version {version} cannot run here (device {setting.device_type}, "
            f"{setting.dtype}, head width {setting.head_dim}, softcap {setting.softcap}): this build has "
            f"version 2 of torch itself, for half precision without softcap on CUDA from capability 8.0"
            f"{_package_remark(version, setting.packages)}; leave it unset to let the engine choose"
        )
    if setting.softcap > 0 or setting.device_type not in ("cpu", "cuda"):
        return "chunked"
    if setting.device_type == "cpu":
        return "sdpa_cpu"
    if version is not None:
        return "flash2"
    return _choose_cuda(setting)


def attend(
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHD: Tensor,
    sinks: Tensor,
    *,
    bounds: Sequence[int],
    softcap: float,
    flash_attn_version: int | None = None,
) -> Tensor:
    """Attend inside each segment, with learned sinks; scores are scaled by the head width ** -0.5.

    Args:
        q_LHD, k_LHD, v_LHD: One dtype; queries and keys are already normalized and rotated.
        sinks: fp32 [sink tokens, H].
        bounds: First row of each segment and the end, host integers.
        softcap: Logit cap; 0 or less means off.
        flash_attn_version: Insist on this version.

    Raises:
        ValueError: Head counts or segment bounds do not fit, or the version cannot run.
    """
    _check_attention(q_LHD, k_LHD, v_LHD, sinks, bounds)
    name = choose_attention(
        attention_setting(
            q_LHD.device, q_LHD.dtype, q_LHD.shape[2], softcap, flash_attn_version=flash_attn_version
        )
    )
    _ran["attention"].add(name)
    scale = q_LHD.shape[2] ** -0.5
    if name == "chunked":
        return attention_kernels.chunked_attention(
            q_LHD, k_LHD, v_LHD, sinks, bounds=bounds, softcap=softcap, scale=scale
        )
    if name == "sdpa_cpu":
        return attention_kernels.sdpa_cpu_attention(q_LHD, k_LHD, v_LHD, sinks, bounds=bounds, scale=scale)
    # Only CUDA processes pay for this import.
    from kernels.gpu import flash

    return flash.cuda_attention(
        name, q_LHD, k_LHD, v_LHD, sinks, bounds=bounds, scale=scale, correct=correct_sinks
    )


def correct_sinks(plain_LHD: Tensor, lse_LH: Tensor, sinks: Tensor, into_LHD: Tensor) -> None:
    """Run `kernels.attention.sink_correction` into a tensor that may be its input."""
    name = choose_tokenwise(_setting(plain_LHD)) if _is_power_of_two(plain_LHD.shape[2]) else "torch"
    _ran["sink_correction"].add(name)
    if name == "torch":
        into_LHD.copy_(attention_kernels.sink_correction(plain_LHD, lse_LH, sinks))
        return
    # Only CUDA processes pay for this import.
    from kernels.gpu import pointwise

    pointwise.sink_correction(plain_LHD, lse_LH, sinks, into_LHD)


def rms_norm(x_LC: Tensor, weight_C: Tensor) -> Tensor:
    """Run `kernels.rms_norm.rms_norm`, rounded to the input's dtype."""
    name = choose_tokenwise(_setting(x_LC))
    _ran["rms_norm"].add(name)
    if name == "torch":
        return rms_norm_definition.rms_norm(x_LC, weight_C).to(x_LC.dtype)
    # Only CUDA processes pay for this import.
    from kernels.gpu import pointwise

    return pointwise.rms_norm(x_LC, weight_C)


def norm_rope(x_LHD: Tensor, weight_D: Tensor, table_LR: Tensor, into_LHD: Tensor) -> None:
    """Run `kernels.qk_norm_rope.qk_norm_rope` into a tensor, rounded to its dtype."""
    name = choose_tokenwise(_setting(x_LHD)) if _is_power_of_two(x_LHD.shape[2]) else "torch"
    _ran["qk_norm_rope"].add(name)
    if name == "torch":
        into_LHD.copy_(qk_norm_rope.qk_norm_rope(x_LHD, weight_D, table_LR))
        return
    # Only CUDA processes pay for this import.
    from kernels.gpu import pointwise

    pointwise.norm_rope(x_LHD, weight_D, table_LR, into_LHD)


def activate(x: Tensor) -> Tensor:
    """Run `kernels.swiglu7.swiglu7`."""
    name = choose_tokenwise(_setting(x))
    _ran["swiglu7"].add(name)
    if name == "torch":
        return swiglu7.swiglu7(x)
    # Only CUDA processes pay for this import.
    from kernels.gpu import pointwise

    return pointwise.swiglu7(x.contiguous())


def read_streams(s_LSC: Tensor, weights: mhc.MixingWeights, gates: mhc.Gates, into_LC: Tensor) -> None:
    """Run `kernels.mhc.gates`, always the definition, and `kernels.mhc.pre_mix`.

    Args:
        s_LSC: Streams of tokens of one modality.
        weights: Of this half of this layer.
        gates: Dense, written.
        into_LC: Dense, written: what the half layer reads.
    """
    name = choose_streams(_setting(s_LSC), s_LSC.shape[1], s_LSC.shape[2])
    _ran["mhc_gates"].add("torch")
    _ran["mhc"].add(name)
    for kept, new in zip(gates, mhc.gates(s_LSC, weights), strict=True):
        kept.copy_(new)
    if name == "torch":
        into_LC.copy_(mhc.pre_mix(s_LSC, gates.pre))
        return
    # Only CUDA processes pay for this import.
    from kernels.gpu import streams

    streams.pre_mix(s_LSC, gates.pre, into_LC)


def write_streams(s_LSC: Tensor, gates: mhc.Gates, out_LC: Tensor) -> None:
    """Run `kernels.mhc.post_mix`, in place."""
    name = choose_streams(_setting(s_LSC), s_LSC.shape[1], s_LSC.shape[2])
    _ran["mhc"].add(name)
    if name == "torch":
        s_LSC.copy_(mhc.post_mix(s_LSC, gates, out_LC))
        return
    # Only CUDA processes pay for this import.
    from kernels.gpu import streams

    streams.post_mix(s_LSC, gates, out_LC)


def route(
    x_LGD: Tensor, gate_GED: Tensor, bias_GE: Tensor, *, top_k: int, route_norm: bool, route_scale: float
) -> mh_moe.Routes:
    """Run `kernels.mh_moe.route`."""
    name = choose_route(_setting(x_LGD), gate_GED.shape[1], x_LGD.shape[2], top_k)
    _ran["route"].add(name)
    chosen = mh_moe.route
    if name == "triton":
        # Only CUDA processes pay for this import.
        from kernels.gpu import routing

        chosen = routing.route
    return chosen(x_LGD, gate_GED, bias_GE, top_k=top_k, route_norm=route_norm, route_scale=route_scale)


def routed_experts(x_LGD: Tensor, routes: mh_moe.Routes, weights: mh_moe.ExpertWeights) -> Tensor:
    """Run `kernels.mh_moe.routed_experts`."""
    name = choose_experts(_setting(x_LGD), x_LGD.shape[2], weights.gate.shape[2])
    _ran["routed_experts"].add(name)
    if name == "torch":
        return mh_moe.routed_experts(x_LGD, routes, weights)
    # Only CUDA processes pay for this import.
    from kernels.gpu import experts

    return experts.routed_experts(name, x_LGD, routes, weights)


def report() -> dict[str, tuple[str, ...]]:
    """Return the implementations that ran since the start or the last `clear_report`, per operation."""
    return {operation: tuple(sorted(names)) for operation, names in sorted(_ran.items())}


def clear_report() -> None:
    """Forget what ran."""
    _ran.clear()


def _honours(version: int, setting: AttentionSetting) -> bool:
    """Whether the torch build's own FlashAttention can stand for the version that was asked for."""
    return (
        version == 2
        and setting.softcap <= 0
        and setting.device_type == "cuda"
        and (setting.capability or (0, 0)) >= (8, 0)
        and setting.dtype in (torch.bfloat16, torch.float16)
        and setting.head_dim % 8 == 0
        and setting.head_dim <= 256
    )


def _package_remark(version: int, packages: tuple[str, ...]) -> str:
    """Say that the version's own package is not called, and whether it is there."""
    package = FLASH_PACKAGES.get(version)
    if package is None:
        return ""
    state = "installed" if package in packages else "not installed"
    return f", and calls no package of the family ({package} is {state})"


def _choose_cuda(setting: AttentionSetting) -> str:
    if setting.dtype not in (torch.bfloat16, torch.float16) or setting.head_dim % 8 or setting.head_dim > 256:
        return "efficient"
    # Measured on one H200 at head width 128: cuDNN 560 TFLOP/s, FlashAttention 2 350.
    is_hopper_or_later = setting.capability is not None and setting.capability >= (9, 0)
    return "cudnn" if is_hopper_or_later and setting.head_dim <= 128 else "flash2"


def _setting(x: Tensor) -> FusedSetting:
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else None
    return FusedSetting(x.device.type, capability, x.dtype, _triton_version() if x.is_cuda else None)


def _triton_version() -> str | None:
    """Return the version installed beside torch."""
    return _version_of("triton")


@cache
def _version_of(distribution: str) -> str | None:
    """Return the installed version, without importing anything."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _check_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Sequence[int]) -> None:
    if q.shape[1] % k.shape[1] or k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"attention heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if sinks.ndim != 2 or sinks.shape[1] != q.shape[1]:
        raise ValueError(f"sinks {tuple(sinks.shape)} must be [sink tokens, {q.shape[1]}]")
    if bounds[0] != 0 or bounds[-1] != q.shape[0] or list(bounds) != sorted(bounds):
        raise ValueError(f"segment bounds {list(bounds)} must rise from 0 to {q.shape[0]}")
