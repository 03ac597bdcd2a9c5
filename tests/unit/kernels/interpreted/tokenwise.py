"""Operations that see one token at a time, interpreted: against their definitions, into poisoned memory."""

import pytest
import torch

from kernels import attention, mhc, qk_norm_rope, rms_norm, swiglu7
from kernels.gpu import pointwise, streams
from tests.unit.kernels.interpreted import exact
from tests.unit.kernels.interpreted.exact import assert_rounded, draw, fp32, poison

exact.use()


@pytest.mark.parametrize("length", [1, 3, 17])
@pytest.mark.parametrize("width", [8, 300, 1031])
def test_rms_norm(length: int, width: int) -> None:
    x, weight = draw(length, width + 8)[:, :width], fp32(width, scale=0.2)
    assert_rounded(pointwise.rms_norm(x, weight), rms_norm.rms_norm(x, weight))


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize(("heads", "width", "pairs"), [(1, 16, 6), (3, 64, 24), (9, 128, 48)])
def test_norm_rope_of_a_view(length: int, heads: int, width: int, pairs: int) -> None:
    x = draw(length, 2 * heads * width)[:, heads * width :].unflatten(1, (heads, width))
    weight, table, whole = fp32(width, scale=0.2), fp32(length, 2 * pairs), poison(length, heads + 1, width)
    pointwise.norm_rope(x, weight, table, whole[:, 1:])
    assert_rounded(whole[:, 1:], qk_norm_rope.qk_norm_rope(x, weight, table))
    assert bool(whole[:, 0].isnan().all())


@pytest.mark.parametrize("shape", [(1, 2), (33, 300), (3, 5, 1366)])
def test_swiglu7(shape: tuple[int, ...]) -> None:
    x = draw(*shape, scale=5.0)
    assert_rounded(pointwise.swiglu7(x), swiglu7.swiglu7(x))


@pytest.mark.parametrize("length", [1, 6, 19])
@pytest.mark.parametrize("heads", [1, 6, 9])
def test_sink_correction_of_any_layout_in_place_too(length: int, heads: int) -> None:
    plain = draw(heads, length, 128).transpose(0, 1)
    lse, sinks, into = fp32(heads, length).T, fp32(2, heads), poison(length, heads, 128)
    lse[: length // 2] = -torch.inf  # rows that saw no key
    want = attention.sink_correction(plain, lse, sinks)
    pointwise.sink_correction(plain, lse, sinks, into)
    assert_rounded(into, want)
    pointwise.sink_correction(plain, lse, sinks, plain)
    assert torch.equal(plain, into)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("width", [64, 704, 1088])
def test_streams_are_read_and_written_in_place(length: int, width: int) -> None:
    s, out = draw(length, 4, width), draw(length, width)
    small = [fp32(*shape, scale=0.5) for shape in ((1,), (1,), (1,), (4,), (4,), (4, 4))]
    weights = mhc.MixingWeights(fp32(4 * width, scale=0.2), fp32(4 * width, 24), *small)
    gates = mhc.Gates(*(g.contiguous() for g in mhc.gates(s, weights)))
    x = poison(length + 1, width)
    streams.pre_mix(s, gates.pre, x[:length])
    assert_rounded(x[:length], mhc.pre_mix(s, gates.pre))
    assert bool(x[length:].isnan().all())
    after = mhc.post_mix(s, gates, out)
    streams.post_mix(s, gates, out)
    assert_rounded(s, after)
