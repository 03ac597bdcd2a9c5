"""RMS norm with the weight stored as an offset from one: the definition, in fp32.

Promises: the mean, the root and the weight are fp32 whatever the input is, and the result stays fp32, so
that the caller rounds once. It knows no modalities: the caller passes the weight row that fits.
"""

import torch
from torch import Tensor

EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize the last dim and scale it by `1 + weight`.

    Args:
        x: [..., D], any float dtype.
        weight: fp32 [D], the offset from one.

    Returns:
        fp32 [..., D].
    Source: the reference, inference/model/magi2_preview.py. Differs: nothing.
    """
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * (1 + weight)
