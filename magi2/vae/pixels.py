"""Pixel values: from the range of the video decoder to bytes.

It lives below `magi2.media` because the decoder itself makes bytes, window by window, on its device.
"""

import torch
from torch import Tensor


def to_uint8(video_BCTYX: Tensor) -> Tensor:
    """Turn a decoded video into RGB frames.

    Args:
        video_BCTYX: any float dtype, [1, 3, T, Y, X]; -1 is black and 1 is full, other values are clamped.

    Returns:
        uint8 [T, Y, X, 3] on the same device. Values are cut, not rounded.

    Raises:
        ValueError: Not one clip of three colours.
    Source: the reference, which truncates; computed in fp32.
    """
    if video_BCTYX.dim() != 5 or video_BCTYX.shape[:2] != (1, 3):
        raise ValueError(f"a video of shape [1, 3, T, Y, X] is needed, got {list(video_BCTYX.shape)}")
    video_TYXC = video_BCTYX[0].permute(1, 2, 3, 0)
    scaled = video_TYXC.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return scaled.mul_(0.5).add_(0.5).clamp_(0.0, 1.0).mul_(255.0).to(torch.uint8)
