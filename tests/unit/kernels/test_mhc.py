"""Stream gates, Sinkhorn and mixing."""

import pytest
import torch
from torch import Tensor

from kernels import mhc
from kernels.mhc import Gates, MixingWeights
from kernels.rms_norm import rms_norm


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(streams: int, width: int) -> MixingWeights:
    flat, mixing = streams * width, streams * (2 + streams)
    return MixingWeights(
        norm=0.1 * seeded(flat),
        phi=seeded(flat, mixing, seed=1),
        alpha_pre=torch.tensor([0.5]),
        alpha_post=torch.tensor([-0.25]),
        alpha_res=torch.tensor([2.0]),
        bias_pre=seeded(streams, seed=2),
        bias_post=seeded(streams, seed=3),
        bias_res=seeded(streams, streams, seed=4),
    )


def spread(num: int, streams: int) -> Tensor:
    return 4 * seeded(num, streams, streams, seed=9)


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_sinkhorn_ends_with_rows_of_one(streams: int) -> None:
    m = mhc.sinkhorn(spread(50, streams))
    torch.testing.assert_close(m.sum(dim=2), torch.ones(50, streams))


def test_sinkhorn_of_many_tokens_is_that_of_each() -> None:
    logits = spread(2500, 3)
    whole = mhc.sinkhorn(logits)
    for first in (0, 1023, 1024, 2499):
        torch.testing.assert_close(mhc.sinkhorn(logits[first : first + 1]), whole[first : first + 1])


def test_sinkhorn_of_no_tokens_is_empty() -> None:
    assert mhc.sinkhorn(torch.zeros(0, 4, 4)).shape == (0, 4, 4)


@pytest.mark.parametrize("streams", [2, 4])
def test_sinkhorn_divides_columns_first(streams: int) -> None:
    logits = spread(20, streams).double()
    want = torch.exp(logits - logits.amax(dim=(1, 2), keepdim=True))
    for _ in range(20):
        want = want / (want.sum(dim=1, keepdim=True) + 1e-12)
        want = want / (want.sum(dim=2, keepdim=True) + 1e-12)
    torch.testing.assert_close(mhc.sinkhorn(logits.float()), want.float(), rtol=1e-4, atol=1e-5)


def test_gates_follow_their_formulas() -> None:
    s, w = seeded(7, 3, 5, seed=8), weights(3, 5)
    got = mhc.gates(s, w)
    z = (rms_norm(s.flatten(1), w.norm) @ w.phi) / 15**0.5
    torch.testing.assert_close(got.pre, torch.sigmoid(0.5 * z[:, :3] + w.bias_pre))
    torch.testing.assert_close(got.post, 2 * torch.sigmoid(-0.25 * z[:, 3:6] + w.bias_post))
    torch.testing.assert_close(got.res, mhc.sinkhorn(2.0 * z[:, 6:].view(7, 3, 3) + w.bias_res))


def test_gates_are_rounded_once_to_the_streams_dtype() -> None:
    s, w = seeded(7, 4, 6, seed=8).bfloat16(), weights(4, 6)
    rounded, exact = mhc.gates(s, w), mhc.gates(s.float(), w)
    for got, want in zip(rounded, exact, strict=True):
        assert torch.equal(got, want.bfloat16())


def test_mixing_reads_and_writes_streams() -> None:
    s, out = seeded(6, 4, 3), seeded(6, 3, seed=1)
    gates = Gates(seeded(6, 4, seed=2), seeded(6, 4, seed=3), seeded(6, 4, 4, seed=4))
    torch.testing.assert_close(mhc.pre_mix(s, gates.pre), torch.einsum("lj,ljc->lc", gates.pre, s))
    want = torch.einsum("lij,ljc->lic", gates.res, s) + gates.post[:, :, None] * out[:, None]
    torch.testing.assert_close(mhc.post_mix(s, gates, out), want)


def test_mixed_streams_are_rounded_once() -> None:
    s, out = seeded(6, 4, 3).bfloat16(), seeded(6, 3, seed=1).bfloat16()
    gates = Gates(*(seeded(6, *shape, seed=2).bfloat16() for shape in ((4,), (4,), (4, 4))))
    exact = mhc.post_mix(s.float(), Gates(*(g.float() for g in gates)), out.float())
    assert torch.equal(mhc.post_mix(s, gates, out), exact.bfloat16())
    assert torch.equal(mhc.pre_mix(s, gates.pre), mhc.pre_mix(s.float(), gates.pre.float()).bfloat16())
