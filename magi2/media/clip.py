"""A finished clip in memory: pictures and sound that fit the contract."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from magi2.contract import NUM_FRAMES, NUM_SAMPLES
from magi2.media.frames import each_resized


@dataclass(frozen=True, eq=False)
class Clip:
    """Ten seconds of video with sound.

    Attributes:
        frames: uint8 [125, Y, X, 3], RGB, on the CPU.
        samples: float32 [441000, 2] at 44.1 kHz, on the CPU; values beyond [-1, 1] are clipped when written.
        output_size: Final (width, height) if that is not the frames' own. Frames are resized one by one when
            they are read: a 4096x4096 clip would take 6 GB at once.

    Raises:
        ValueError: Shape or dtype of a tensor breaks the contract.
    """

    frames: Tensor
    samples: Tensor
    output_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        shape = self.frames.shape
        if self.frames.dtype != torch.uint8 or len(shape) != 4 or (shape[0], shape[3]) != (NUM_FRAMES, 3):
            raise ValueError(f"frames must be uint8 [{NUM_FRAMES}, Y, X, 3], got {_described(self.frames)}")
        if self.samples.dtype != torch.float32 or self.samples.shape != (NUM_SAMPLES, 2):
            raise ValueError(f"samples must be float32 [{NUM_SAMPLES}, 2], got {_described(self.samples)}")
        if self.frames.device.type != "cpu" or self.samples.device.type != "cpu":
            raise ValueError("frames and samples of a clip must be on the CPU")

    @property
    def width(self) -> int:
        """Width of the finished video."""
        return self.output_size[0] if self.output_size else self.frames.shape[2]

    @property
    def height(self) -> int:
        """Height of the finished video."""
        return self.output_size[1] if self.output_size else self.frames.shape[1]

    def each_frame(self) -> Iterator[Tensor]:
        """Yield the finished frames in order, uint8 [height, width, 3]."""
        if self.output_size is None:
            return iter(self.frames)
        return each_resized(self.frames, *self.output_size)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
