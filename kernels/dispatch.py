"""Which implementation of each operation runs, and a record of what did.

Promises: the choice is a pure function of device, dtype, head width, softcap and an override; what a
request asks for and no implementation honours is refused by name, never done another way in silence.
Nothing else calls attention. The record is for the whole process; the torch definitions in the sibling
modules say what is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import attention as attention_kernels
from kernels import mh_moe, mhc, qk_norm_rope, swiglu7

_ran: defaultdict[str, set[str]] = defaultdict(set)


class AttentionSetting(NamedTuple):
    """All that decides which attention runs; `capability` is None off CUDA."""

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    softcap: float
    flash_attn_version: int | None = None


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
            f"version 2, for half precision without softcap on CUDA; leave it unset to let the engine choose"
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
    capability = torch.cuda.get_device_capability(q_LHD.device) if q_LHD.is_cuda else None
    name = choose_attention(
        AttentionSetting(
            q_LHD.device.type, capability, q_LHD.dtype, q_LHD.shape[2], softcap, flash_attn_version
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

    return flash.cuda_attention(name, q_LHD, k_LHD, v_LHD, sinks, bounds=bounds, scale=scale)


def norm_rope(x_LHD: Tensor, weight_D: Tensor, table_LR: Tensor) -> Tensor:
    """Run `kernels.qk_norm_rope.qk_norm_rope`."""
    _ran["qk_norm_rope"].add("torch")
    return qk_norm_rope.qk_norm_rope(x_LHD, weight_D, table_LR)


def activate(x: Tensor) -> Tensor:
    """Run `kernels.swiglu7.swiglu7`."""
    _ran["swiglu7"].add("torch")
    return swiglu7.swiglu7(x)


def stream_gates(s_LSC: Tensor, weights: mhc.MixingWeights) -> mhc.Gates:
    """Run `kernels.mhc.gates`."""
    _ran["mhc"].add("torch")
    return mhc.gates(s_LSC, weights)


def read_streams(s_LSC: Tensor, pre_LS: Tensor) -> Tensor:
    """Run `kernels.mhc.pre_mix`."""
    _ran["mhc"].add("torch")
    return mhc.pre_mix(s_LSC, pre_LS)


def write_streams(s_LSC: Tensor, gates: mhc.Gates, out_LC: Tensor) -> Tensor:
    """Run `kernels.mhc.post_mix`."""
    _ran["mhc"].add("torch")
    return mhc.post_mix(s_LSC, gates, out_LC)


def route(
    x_LGD: Tensor, gate_GED: Tensor, bias_GE: Tensor, *, top_k: int, route_norm: bool, route_scale: float
) -> mh_moe.Routes:
    """Run `kernels.mh_moe.route`."""
    _ran["route"].add("torch")
    return mh_moe.route(x_LGD, gate_GED, bias_GE, top_k=top_k, route_norm=route_norm, route_scale=route_scale)


def routed_experts(x_LGD: Tensor, routes: mh_moe.Routes, weights: mh_moe.ExpertWeights) -> Tensor:
    """Run `kernels.mh_moe.routed_experts`."""
    _ran["routed_experts"].add("torch")
    return mh_moe.routed_experts(x_LGD, routes, weights)


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
        and setting.dtype in (torch.bfloat16, torch.float16)
        and setting.head_dim % 8 == 0
    )


def _choose_cuda(setting: AttentionSetting) -> str:
    if setting.dtype not in (torch.bfloat16, torch.float16) or setting.head_dim % 8 or setting.head_dim > 256:
        return "efficient"
    # Measured on one H200 at head width 128: cuDNN 560 TFLOP/s, FlashAttention 2 350.
    is_hopper_or_later = setting.capability is not None and setting.capability >= (9, 0)
    return "cudnn" if is_hopper_or_later and setting.head_dim <= 128 else "flash2"


def _check_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Sequence[int]) -> None:
    if q.shape[1] % k.shape[1] or k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"attention heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if sinks.ndim != 2 or sinks.shape[1] != q.shape[1]:
        raise ValueError(f"sinks {tuple(sinks.shape)} must be [sink tokens, {q.shape[1]}]")
    if bounds[0] != 0 or bounds[-1] != q.shape[0] or list(bounds) != sorted(bounds):
        raise ValueError(f"segment bounds {list(bounds)} must rise from 0 to {q.shape[0]}")
