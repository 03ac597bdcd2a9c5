"""The choice of fused kernels as a table, and what the dispatcher writes where none fits."""

import pytest
import torch

from kernels import dispatch, mhc, qk_norm_rope, rms_norm
from kernels.dispatch import FusedSetting

VERSION = "3.6.0"
RELEASED = {"width": 256, "width_inner": 1280}


def cuda(
    major: int, minor: int, *, dtype: torch.dtype = torch.bfloat16, triton: str | None = VERSION
) -> FusedSetting:
    return FusedSetting("cuda", (major, minor), dtype, triton)


CPU = FusedSetting("cpu", None, torch.bfloat16, VERSION)
# Only capability 9.0 was measured; the others say what would be tried there.
TABLE = [
    (cuda(7, 5), "torch", "torch", "torch"),
    (cuda(8, 0), "triton", "torch", "torch"),
    (cuda(8, 9), "triton", "torch", "torch"),
    (cuda(9, 0), "triton", "triton", "hopper"),
    (cuda(10, 0), "triton", "torch", "torch"),
    (cuda(12, 0), "triton", "torch", "torch"),
    (CPU, "torch", "torch", "torch"),
    (FusedSetting("mps", None, torch.bfloat16, VERSION), "torch", "torch", "torch"),
]


@pytest.mark.parametrize(("setting", "tokenwise", "route", "experts"), TABLE, ids=str)
def test_choice_by_device(setting: FusedSetting, tokenwise: str, route: str, experts: str) -> None:
    assert dispatch.choose_tokenwise(setting) == tokenwise
    assert dispatch.choose_streams(setting, 4, 3072) == tokenwise
    assert dispatch.choose_route(setting, 256, 256, 6) == route
    assert dispatch.choose_experts(setting, **RELEASED) == experts


@pytest.mark.parametrize(
    "setting",
    [cuda(9, 0, dtype=torch.float32), cuda(9, 0, dtype=torch.float16), cuda(9, 0, triton=None)],
    ids=["fp32", "fp16", "no triton"],
)
def test_definition_runs_what_the_kernels_do_not_take(setting: FusedSetting) -> None:
    assert dispatch.choose_tokenwise(setting) == "torch"
    assert dispatch.choose_streams(setting, 4, 3072) == "torch"
    assert dispatch.choose_route(setting, 256, 256, 6) == "torch"
    assert dispatch.choose_experts(setting, **RELEASED) == "torch"


@pytest.mark.parametrize(
    ("num_experts", "width", "top_k", "name"),
    [(256, 256, 6, "triton"), (8, 256, 2, "triton"), (4, 256, 2, "torch"), (48, 256, 2, "torch"),
     (512, 256, 6, "torch"), (16, 64, 8, "triton"), (64, 96, 4, "torch"), (64, 128, 9, "torch")],
)  # fmt: skip
def test_choice_of_routing_by_size(num_experts: int, width: int, top_k: int, name: str) -> None:
    assert dispatch.choose_route(cuda(9, 0), num_experts, width, top_k) == name


@pytest.mark.parametrize(
    ("width", "width_inner", "triton", "name"),
    [(256, 1280, "3.6.1", "hopper"), (256, 1280, "3.7.0", "triton"), (256, 96, VERSION, "triton"),
     (128, 1280, VERSION, "triton"), (32, 32, VERSION, "torch"), (256, 40, VERSION, "torch")],
)  # fmt: skip
def test_choice_of_experts_by_size_and_version(width: int, width_inner: int, triton: str, name: str) -> None:
    assert dispatch.choose_experts(cuda(9, 0, triton=triton), width, width_inner) == name


@pytest.mark.parametrize(
    ("num_streams", "width", "name"), [(4, 64, "triton"), (3, 64, "torch"), (4, 96, "torch")]
)
def test_choice_of_streams_by_size(num_streams: int, width: int, name: str) -> None:
    assert dispatch.choose_streams(cuda(9, 0), num_streams, width) == name


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_streams_are_read_and_written_in_place_as_defined() -> None:
    s, out = seeded(7, 4, 8).bfloat16(), seeded(7, 8, seed=1).bfloat16()
    small = [seeded(*shape, seed=2) for shape in ((1,), (1,), (1,), (4,), (4,), (4, 4))]
    weights = mhc.MixingWeights(seeded(32, seed=3), seeded(32, 24, seed=4), *small)
    want = mhc.gates(s, weights)
    gates = mhc.Gates(*(torch.full(g.shape, torch.nan, dtype=g.dtype) for g in want))
    x = torch.full((7, 8), torch.nan, dtype=s.dtype)
    dispatch.read_streams(s, weights, gates, x)
    assert all(torch.equal(a, b) for a, b in zip(gates, want, strict=True))
    assert torch.equal(x, mhc.pre_mix(s, want.pre))
    after = mhc.post_mix(s, want, out)
    dispatch.write_streams(s, gates, out)
    assert torch.equal(s, after)


def test_norm_and_rotation_round_once_into_their_target() -> None:
    x, weight, table = seeded(5, 3, 16).bfloat16(), seeded(16, seed=1), seeded(5, 12, seed=2)
    into = torch.full(x.shape, torch.nan, dtype=x.dtype)
    dispatch.norm_rope(x, weight, table, into)
    assert torch.equal(into, qk_norm_rope.qk_norm_rope(x, weight, table).bfloat16())
    rows = x.flatten(1)
    wide = seeded(48, seed=3)
    assert torch.equal(dispatch.rms_norm(rows, wide), rms_norm.rms_norm(rows, wide).bfloat16())
