"""RMS norm, SwiGLU7 and the rotary step, restated."""

import pytest
import torch

from kernels.qk_norm_rope import qk_norm_rope, rotate
from kernels.rms_norm import rms_norm
from kernels.swiglu7 import swiglu7, swiglu7_pair


def test_rms_norm_takes_its_weight_as_an_offset_from_one() -> None:
    x = torch.tensor([[3.0, 4.0]])
    got = rms_norm(x, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(got, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 3), torch.ones(3)), torch.zeros(2, 3))


def test_rms_norm_works_in_fp32_whatever_comes_in() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = rms_norm(x, torch.zeros(8))
    assert got.dtype == torch.float32
    assert torch.equal(got, rms_norm(x.float(), torch.zeros(8)))


def test_swiglu7_reads_gates_from_even_columns() -> None:
    gate, up = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    interleaved = torch.tensor([[1.0, 0.5, -2.0, 3.0]])
    torch.testing.assert_close(swiglu7(interleaved), swiglu7_pair(gate, up))
    torch.testing.assert_close(swiglu7_pair(gate, up), gate * torch.sigmoid(1.702 * gate) * (up + 1))


def test_swiglu7_limits_the_gate_above_and_the_linear_part_on_both_sides() -> None:
    at_limit = swiglu7_pair(torch.tensor([7.0, 7.0]), torch.tensor([7.0, -7.0]))
    beyond = swiglu7_pair(torch.tensor([50.0, 50.0]), torch.tensor([50.0, -50.0]))
    assert torch.equal(beyond, at_limit)
    # The gate has no lower limit: -50 gives nearly zero, -7 would not.
    assert abs(float(swiglu7_pair(torch.tensor(-50.0), torch.tensor(0.0)))) < 1e-30


def test_swiglu7_keeps_the_dtype_of_its_input() -> None:
    assert swiglu7(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("head_dim", "pairs"), [(8, 3), (16, 6), (32, 12)])
def test_rotation_turns_pairs_a_fixed_distance_apart(head_dim: int, pairs: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(5, 2, head_dim, generator=generator)
    angles = torch.randn(5, pairs, generator=generator)
    got = rotate(x, torch.cat([torch.sin(angles), torch.cos(angles)], dim=1))
    turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs])
    turned = turned * torch.polar(torch.ones(5, 1, pairs), angles[:, None])
    torch.testing.assert_close(got[..., :pairs], turned.real)
    torch.testing.assert_close(got[..., pairs : 2 * pairs], turned.imag)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


def test_queries_are_normed_per_head_before_they_turn() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 8, generator=generator).bfloat16()
    weight = torch.randn(8, generator=generator)
    table = torch.cat([torch.zeros(3, 3), torch.ones(3, 3)], dim=1)
    got = qk_norm_rope(x, weight, table)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, rms_norm(x, weight))
