"""The rotary table of each kind of part."""

import pytest
import torch

from magi2 import packing
from magi2.model.embed import default_bands, rotary_table
from tests.unit.magi2.model.tiny import conditioning, latents

BANDS = default_bands(2)


def angles(coords: torch.Tensor) -> torch.Tensor:
    table = rotary_table(coords, BANDS)
    return torch.atan2(table[:, :6], table[:, 6:])


def part_coords(kind: packing.Kind) -> torch.Tensor:
    batch = packing.pack(*latents(), conditioning(num_images=1))
    part = next(p for p in batch.parts if p.kind is kind)
    return batch.coords[part.start : part.stop]


def test_text_has_no_position() -> None:
    assert torch.equal(angles(part_coords(packing.Kind.TEXT)), torch.zeros(5, 6))


def test_a_single_text_token_stands_one_step_before_the_clip() -> None:
    coords = torch.tensor([[-1.0, 0, 0, 1, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(angles(coords), torch.tensor([[-1.0, -0.01, 0, 0, 0, 0]]))


def test_audio_ends_where_the_video_does() -> None:
    got = angles(part_coords(packing.Kind.AUDIO))
    # 9 audio latents stretch over 2 video latents: steps of 1/8 from 0 to 1.
    torch.testing.assert_close(got[:, 0], torch.arange(9) / 8)
    assert torch.equal(got[:, 2:], torch.zeros(9, 4))


def test_height_and_width_are_centered_and_time_is_not() -> None:
    got = angles(part_coords(packing.Kind.VIDEO)).view(2, 3, 4, 6)
    torch.testing.assert_close(got[:, 0, 0, 0], torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(got[0, :, 0, 2], torch.tensor([-1.0, 0.0, 1.0]))
    torch.testing.assert_close(got[0, 0, :, 4], torch.tensor([-1.5, -0.5, 0.5, 1.5]))


def test_size_one_against_another_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="size 1 need a reference size of 1"):
        rotary_table(torch.tensor([[0.0, 0, 0, 1, 4, 4, 8, 4, 4]]), BANDS)


def test_default_bands_fall_from_one() -> None:
    torch.testing.assert_close(default_bands(4), torch.tensor([1.0, 0.1, 0.01, 0.001]))
