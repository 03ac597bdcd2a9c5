"""The final resize, on frames whose result is known."""

import torch

from magi2.media.frames import each_resized, resize_frames


def test_flat_frames_stay_flat_at_any_size() -> None:
    frames = torch.full((2, 4, 6, 3), 255, dtype=torch.uint8)
    assert torch.equal(resize_frames(frames, 10, 2), torch.full((2, 2, 10, 3), 255, dtype=torch.uint8))


def test_values_between_two_pixels_are_interpolated_and_cut() -> None:
    frames = torch.tensor([0, 101], dtype=torch.uint8).view(1, 1, 2, 1).expand(1, 1, 2, 3)
    assert resize_frames(frames, 4, 1)[0, 0, :, 0].tolist() == [0, 25, 75, 101]


def test_frames_are_stretched_to_exactly_the_size_asked_for() -> None:
    frames = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    assert resize_frames(frames, 442, 250).shape == (3, 250, 442, 3)
    assert [frame.shape for frame in each_resized(frames, 5, 7)] == [(7, 5, 3)] * 3
