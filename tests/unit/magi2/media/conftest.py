"""Small clips and one written file, shared by the tests of this folder."""

import math
from pathlib import Path

import pytest
import torch

from magi2.media.clip import Clip
from magi2.media.mp4 import write_mp4


def moving_clip(width: int, height: int, output_size: tuple[int, int] | None = None) -> Clip:
    """Make a clip whose frames all differ, with another tone in each ear."""
    rows = torch.arange(height).view(1, height, 1).expand(125, height, width)
    columns = torch.arange(width).view(1, 1, width).expand(125, height, width)
    times = torch.arange(125).view(125, 1, 1).expand(125, height, width)
    frames = torch.stack((columns * 2 + times * 8, rows * 2 + times * 8, times * 2), dim=-1).remainder(256)
    seconds = torch.arange(441_000, dtype=torch.float64) / 44_100
    tones = [0.5 * torch.sin(2 * math.pi * hertz * seconds) for hertz in (440, 660)]
    return Clip(frames.to(torch.uint8), torch.stack(tones, dim=-1).float(), output_size)


@pytest.fixture(scope="session")
def clip() -> Clip:
    return moving_clip(96, 64)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, clip: Clip) -> Path:
    path = tmp_path_factory.mktemp("written") / "clip.mp4"
    write_mp4(path, clip, preset="ultrafast")
    return path
