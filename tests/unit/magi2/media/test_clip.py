"""A clip takes only tensors of the contract, and resizes its frames one by one."""

import pytest
import torch
from torch import Tensor

from magi2.media.clip import Clip
from magi2.media.frames import resize_frames

FRAMES = torch.zeros(125, 4, 6, 3, dtype=torch.uint8)
SAMPLES = torch.zeros(441_000, 2)


def test_frames_keep_their_size_without_an_output_size() -> None:
    clip = Clip(FRAMES, SAMPLES)
    assert (clip.width, clip.height) == (6, 4)
    assert torch.equal(torch.stack(list(clip.each_frame())), FRAMES)


def test_output_size_resizes_each_frame() -> None:
    frames = torch.randint(0, 256, FRAMES.shape, dtype=torch.uint8)
    clip = Clip(frames, SAMPLES, (10, 8))
    assert (clip.width, clip.height) == (10, 8)
    assert torch.equal(torch.stack(list(clip.each_frame())), resize_frames(frames, 10, 8))


@pytest.mark.parametrize(
    ("frames", "samples", "message"),
    [
        (FRAMES[:124], SAMPLES, r"frames must be uint8 \[125, Y, X, 3\], got uint8 \[124, 4, 6, 3\]"),
        (FRAMES.float(), SAMPLES, r"got float32 \[125, 4, 6, 3\]"),
        (FRAMES[..., :1], SAMPLES, r"got uint8 \[125, 4, 6, 1\]"),
        (FRAMES, SAMPLES[:-1], r"samples must be float32 \[441000, 2\], got float32 \[440999, 2\]"),
        (FRAMES, SAMPLES.T, r"got float32 \[2, 441000\]"),
        (FRAMES, SAMPLES.double(), "got float64"),
        (FRAMES.to("meta"), SAMPLES, "must be on the CPU"),
    ],
)
def test_tensors_outside_the_contract_are_refused(frames: Tensor, samples: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Clip(frames, samples)
