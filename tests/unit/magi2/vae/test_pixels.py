"""From the decoder's range to bytes."""

import pytest
import torch

from magi2.vae.pixels import to_uint8


def test_values_are_clamped_and_cut() -> None:
    values = torch.tensor([-9.0, -1.0, -0.001, 0.0, 0.999, 1.0, 9.0])
    video = values.view(1, 1, 1, 1, 7).expand(1, 3, 1, 1, 7)
    assert to_uint8(video)[0, 0, :, 0].tolist() == [0, 0, 127, 127, 254, 255, 255]


def test_colours_become_the_last_dim_and_the_input_stays() -> None:
    video = torch.stack([torch.full((2, 4, 6), value) for value in (-1.0, 0.0, 1.0)]).unsqueeze(0)
    frames = to_uint8(video)
    assert frames.shape == (2, 4, 6, 3)
    assert frames[1, 3, 5].tolist() == [0, 127, 255]
    assert frames.is_contiguous()
    assert video[0, 0, 0, 0, 0] == -1.0


@pytest.mark.parametrize("shape", [(2, 3, 1, 2, 2), (1, 4, 1, 2, 2), (3, 1, 2, 2)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 3, T, Y, X\] is needed"):
        to_uint8(torch.zeros(shape))
