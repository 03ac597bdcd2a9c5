"""The rotary table of packed coordinates.

Promises: fp32 angles from stored bands; text carries no position of its own, as its time axis is scaled by
zero; audio is stretched onto the video's time axis; heights and widths are centered. A size of one that is
not a size of one in its reference is an error.
"""

import torch
from torch import Tensor, nn

_NUM_AXES = 3
_MAX_PERIOD = 10_000


class RotaryTable(nn.Module):
    """Holds the checkpoint's bands, fp32 [pairs per axis]."""

    bands: Tensor

    def __init__(self, num_bands: int) -> None:
        super().__init__()
        self.register_buffer("bands", torch.empty(num_bands, dtype=torch.float32))

    def forward(self, coords: Tensor) -> Tensor:
        """Return fp32 [L, 6 * bands] for packed coordinates [L, 9]; see `rotary_table`."""
        return rotary_table(coords, self.bands)


def rotary_table(coords: Tensor, bands: Tensor) -> Tensor:
    """Return the sines, then the cosines, of all axes' angles.

    Args:
        coords: fp32 [L, 9]: position, size, reference size, each (t, h, w).
        bands: fp32 [bands].

    Raises:
        ValueError: A part has size one on an axis where its reference has not.
    Source: the reference, inference/model/magi2_preview.py. Differs: the division by zero is named.
    """
    position, size, reference = torch.split(coords.float(), _NUM_AXES, dim=1)
    if bool(((size == 1) & (reference != 1)).any()):
        raise ValueError("coordinates of a part of size 1 need a reference size of 1 on the same axis")
    scale = torch.where(size == 1, torch.ones_like(size), (reference - 1) / (size - 1).clamp_min(1))
    center = (size - 1) / 2
    center[:, 0] = 0
    angles = ((position - center) * scale)[:, :, None] * bands
    angles = angles.flatten(1)
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)


def default_bands(num_bands: int) -> Tensor:
    """Return the bands that a new checkpoint starts with, fp32 [num_bands]."""
    return _MAX_PERIOD ** -(torch.arange(num_bands, dtype=torch.float32) / num_bands)
