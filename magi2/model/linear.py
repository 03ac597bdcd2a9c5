"""Weights that exist once, or once per modality: matrices and RMS norms.

Promises: one module holds all modalities' blocks stacked on dim 0, as the checkpoint stores them, and takes
the block of the modality it is told. Weights are created empty; a checkpoint fills them. It does not look
at token order.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.rms_norm import rms_norm


class ModalityLinear(nn.Module):
    """A matrix without bias, [modalities * out, in]; with one modality, the same for all tokens."""

    def __init__(self, in_features: int, out_features: int, num_modalities: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_modalities = num_modalities
        self.weight = parameter(num_modalities * out_features, in_features, dtype=dtype)

    def forward(self, x: Tensor, modality: int) -> Tensor:
        """Multiply rows [n, in] of one modality by its block; the dtype stays."""
        return functional.linear(x, _block(self.weight, self.num_modalities, modality))


class ModalityNorm(nn.Module):
    """An RMS norm whose fp32 weight, an offset from one, is [modalities * dim]."""

    def __init__(self, dim: int, num_modalities: int) -> None:
        super().__init__()
        self.num_modalities = num_modalities
        self.weight = parameter(num_modalities * dim, dtype=torch.float32)

    def forward(self, x: Tensor, modality: int) -> Tensor:
        """Normalize rows of one modality; fp32 out."""
        return rms_norm(x, self.weight_of(modality))

    def weight_of(self, modality: int) -> Tensor:
        """Return the weight that one modality uses, [dim]."""
        return _block(self.weight, self.num_modalities, modality)


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an unfilled weight; nothing here is trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _block(weight: Tensor, num_modalities: int, modality: int) -> Tensor:
    if num_modalities == 1:
        return weight
    # Asked of the weight: a tensor-parallel rank holds a part of every block.
    size = weight.shape[0] // num_modalities
    return weight[modality * size : (modality + 1) * size]
