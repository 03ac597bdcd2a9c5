"""Finished frames: from decoder output to bytes, and the optional final resize.

Both cut values instead of rounding them, as the reference does. `to_uint8` is the video decoder's own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from magi2.vae.pixels import to_uint8

__all__ = ["each_resized", "resize_frames", "to_uint8"]


def resize_frames(frames_TYXC: Tensor, width: int, height: int) -> Tensor:
    """Resize frames to an exact size, stretching if the aspect differs.

    Args:
        frames_TYXC: uint8 [T, Y, X, 3].
        width, height: The new size.

    Returns:
        uint8 [T, height, width, 3] on the same device.
    Source: the reference: bilinear without antialiasing in fp32, then truncation. Differs: nothing.
    """
    resized = torch.empty((len(frames_TYXC), height, width, 3), dtype=torch.uint8, device=frames_TYXC.device)
    for index, frame in enumerate(each_resized(frames_TYXC, width, height)):
        resized[index] = frame
    return resized


def each_resized(frames_TYXC: Tensor, width: int, height: int) -> Iterator[Tensor]:
    """Yield the frames of `resize_frames` one by one, so that never more than one is held."""
    for frame_YXC in frames_TYXC:
        image_1CYX = frame_YXC.permute(2, 0, 1).unsqueeze(0).to(torch.float32) / 255.0
        resized = functional.interpolate(
            image_1CYX, size=(height, width), mode="bilinear", align_corners=False
        )
        yield resized.clamp_(0.0, 1.0).mul_(255.0).to(torch.uint8)[0].permute(1, 2, 0).contiguous()
