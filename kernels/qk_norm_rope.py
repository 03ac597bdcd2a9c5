"""Per-head norm and rotary position of queries or keys, in the model's order: the definition, in fp32.

Promises: one fp32 result for the caller to round. The rotated pairs are (i, i + R) over the first 2R
channels of a head, not neighbours; the channels behind them pass unrotated. It builds no table.
"""

import torch
from torch import Tensor

from kernels.rms_norm import rms_norm


def qk_norm_rope(x_LHD: Tensor, weight_D: Tensor, table_LR: Tensor) -> Tensor:
    """Normalize each head, then rotate it by its token's angles.

    Args:
        x_LHD: Queries or keys as projected, any float dtype.
        weight_D: fp32, one norm weight for all heads, as an offset from one.
        table_LR: fp32 [L, 2 * pairs]: all sines, then all cosines.

    Returns:
        fp32 [L, H, D].
    Source: the reference, inference/model/magi2_preview.py. Differs: nothing.
    """
    return rotate(rms_norm(x_LHD, weight_D), table_LR)


def rotate(x_LHD: Tensor, table_LR: Tensor) -> Tensor:
    """Rotate the channel pairs of every head by the angles of its token; fp32 in, fp32 out."""
    pairs = table_LR.shape[1] // 2
    sin, cos = table_LR[:, None, :pairs], table_LR[:, None, pairs:]
    first, second = x_LHD[..., :pairs], x_LHD[..., pairs : 2 * pairs]
    rotated = [first * cos - second * sin, second * cos + first * sin, x_LHD[..., 2 * pairs :]]
    return torch.cat(rotated, dim=-1)
