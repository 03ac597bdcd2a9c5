"""Plain guidance, in fp32."""

import pytest
import torch

from magi2.sampling.guidance import guide


def test_guidance_moves_from_the_unconditional_through_the_conditional() -> None:
    prediction = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    assert guide(prediction, 5.0).tolist() == [[11.0, -3.0]]


def test_scale_one_gives_the_conditional_and_zero_the_unconditional() -> None:
    prediction = torch.tensor([[[3.0, 1.0]], [[1.0, 2.0]]])
    assert guide(prediction, 1.0).tolist() == [[[3.0, 1.0]]]
    assert guide(prediction, 0.0).tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_result_is_fp32(dtype: torch.dtype) -> None:
    assert guide(torch.ones(2, 3, dtype=dtype), 7.0).dtype == torch.float32
