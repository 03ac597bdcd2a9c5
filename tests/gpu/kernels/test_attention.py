"""Every CUDA attention against the definition, at shapes that no tile fits."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from kernels.attention import chunked_attention
from kernels.gpu.flash import cuda_attention
from tests import tolerances

BOUNDS = {
    "unequal-branches": [0, 1000, 1777],
    "one-token-branch": [0, 1, 322],
    "shorter-than-a-tile": [0, 7, 20],
}


def inputs(
    device: torch.device, length: int, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator(device=device).manual_seed(length + heads)
    shapes = [(length, heads, head_dim), (length, key_heads, head_dim), (length, key_heads, head_dim)]
    return [torch.randn(s, device=device, generator=generator).to(dtype) for s in shapes]


def definition(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: list[int], softcap: float = -1.0
) -> Tensor:
    return chunked_attention(
        q.float(),
        k.float(),
        v.float(),
        sinks,
        bounds=bounds,
        softcap=softcap,
        scale=q.shape[2] ** -0.5,
    )


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (6, 6), (24, 24)], ids=str)
@pytest.mark.parametrize("name", ["cudnn", "flash2", "efficient"])
def test_half_precision_kernels_equal_the_definition(
    device: torch.device, name: str, heads: tuple[int, int], bounds: list[int]
) -> None:
    q, k, v = inputs(device, bounds[-1], *heads, 128, torch.bfloat16)
    for sinks in (torch.randn(1, heads[0], device=device), torch.randn(2, heads[0], device=device)):
        got = cuda_attention(name, q, k, v, sinks, bounds=bounds, scale=128**-0.5)
        assert relative(got, definition(q, k, v, sinks, bounds)) <= tolerances.DIT_BF16_MODULE


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_fp32_kernel_equals_the_definition(device: torch.device, head_dim: int) -> None:
    bounds = [0, 700, 1111]
    q, k, v = inputs(device, bounds[-1], 4, 2, head_dim, torch.float32)
    sinks = torch.randn(1, 4, device=device)
    got = dispatch.attend(q, k, v, sinks, bounds=bounds, softcap=-1.0)
    torch.testing.assert_close(got, definition(q, k, v, sinks, bounds), **tolerances.DIT_FP32)


@pytest.mark.parametrize("value", [-torch.inf, 80.0, 1e4])
def test_extreme_sinks_stay_finite(device: torch.device, value: float) -> None:
    q, k, v = inputs(device, 333, 2, 2, 128, torch.bfloat16)
    sinks = torch.full((1, 2), value, device=device)
    got = dispatch.attend(q, k, v, sinks, bounds=[0, 333], softcap=-1.0)
    want = definition(q, k, v, sinks, [0, 333])
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_softcap_is_honoured(device: torch.device) -> None:
    q, k, v = (4 * x for x in inputs(device, 500, 4, 4, 128, torch.bfloat16))
    sinks = torch.randn(1, 4, device=device)
    dispatch.clear_report()
    got = dispatch.attend(q, k, v, sinks, bounds=[0, 200, 500], softcap=3.0)
    assert dispatch.report() == {"attention": ("chunked",)}
    assert relative(got, definition(q, k, v, sinks, [0, 200, 500], 3.0)) <= tolerances.DIT_BF16_MODULE


def test_views_of_an_exchange_are_taken_as_they_are(device: torch.device) -> None:
    whole = torch.randn(900, 12, 128, device=device, dtype=torch.bfloat16)
    q, k, v = whole[:, :4], whole[:, 4:8], whole[:, 8:]
    sinks = torch.zeros(1, 4, device=device)
    got = dispatch.attend(q, k, v, sinks, bounds=[0, 400, 900], softcap=-1.0)
    assert relative(got, definition(q, k, v, sinks, [0, 400, 900])) <= tolerances.DIT_BF16_MODULE


def test_released_length_needs_no_score_matrix(device: torch.device) -> None:
    bounds = [0, 14_800, 29_600]
    q, k, v = inputs(device, bounds[-1], 24, 24, 128, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dispatch.attend(q, k, v, torch.zeros(1, 24, device=device), bounds=bounds, softcap=-1.0)
    # One head's scores of one branch would be 876 MB in fp32; the output and a branch's copies are far below.
    assert torch.cuda.max_memory_allocated() - before <= 8 * q.nbytes


@pytest.mark.parametrize("softcap", [-1.0, 2.0])
def test_equal_inputs_give_equal_bits(device: torch.device, softcap: float) -> None:
    q, k, v = inputs(device, 3000, 6, 6, 128, torch.bfloat16)
    sinks = torch.zeros(1, 6, device=device)
    first, second = (
        dispatch.attend(q, k, v, sinks, bounds=[0, 1300, 3000], softcap=softcap) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_segments_do_not_see_each_other(device: torch.device) -> None:
    bounds = [0, 129, 300, 301]
    q, k, v = inputs(device, bounds[-1], 2, 2, 128, torch.bfloat16)
    sinks = torch.zeros(1, 2, device=device)
    whole = dispatch.attend(q, k, v, sinks, bounds=bounds, softcap=-1.0)
    for start, stop in pairwise(bounds):
        rows = slice(start, stop)
        alone = dispatch.attend(q[rows], k[rows], v[rows], sinks, bounds=[0, stop - start], softcap=-1.0)
        torch.testing.assert_close(whole[rows], alone)
