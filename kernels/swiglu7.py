"""The MAGI activation: a clamped gate times a clamped linear part, in fp32: the definition.

Promises: fp32 inside. The gate has no lower clamp. Dense and shared-expert matrices interleave gate and
linear part column by column (`swiglu7`); routed experts keep them apart (`swiglu7_pair`).
"""

import torch
from torch import Tensor

ALPHA = 1.702
LIMIT = 7.0


def swiglu7(x: Tensor) -> Tensor:
    """Return [..., F] of [..., 2F], even columns gate and odd ones linear part, in the input's dtype."""
    return swiglu7_pair(x[..., 0::2], x[..., 1::2]).to(x.dtype)


def swiglu7_pair(gate: Tensor, up: Tensor) -> Tensor:
    """Return the fp32 activation of a gate and a linear part of the same shape.

    Source: the reference, inference/model/magi2_preview.py. Differs: nothing.
    """
    gate = gate.float().clamp(max=LIMIT)
    up = up.float().clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
