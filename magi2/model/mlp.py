"""The dense MLP half of a layer.

Promises: blocks of one modality in packed order, so the inner width never meets all tokens at once; over
tensor-parallel ranks one sum at the end.
"""

import torch
from torch import Tensor, nn

from kernels import dispatch
from magi2.config import ModelConfig
from magi2.model.linear import ModalityLinear, ModalityNorm
from magi2.model.tokens import Tokens
from magi2.parallel.groups import Groups


class DenseMLP(nn.Module):
    """Norm, interleaved gate and up projection, SwiGLU7, down projection."""

    def __init__(self, config: ModelConfig, num_modalities: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.dense_intermediate
        self.groups = Groups()
        self.pre_norm = ModalityNorm(width, num_modalities)
        self.up_gate_proj = ModalityLinear(width, 2 * inner, num_modalities, dtype)
        self.down_proj = ModalityLinear(inner, width, num_modalities, dtype)

    def forward(self, x_LC: Tensor, tokens: Tokens) -> Tensor:
        """Return the half's output [L, C] in the dtype of its input."""
        out = torch.empty_like(x_LC)
        for start, stop, modality in tokens.blocks:
            a = dispatch.rms_norm(x_LC[start:stop], self.pre_norm.weight_of(modality))
            hidden = dispatch.activate(self.up_gate_proj(a, modality))
            out[start:stop] = self.down_proj(hidden, modality)
        return self.groups.tp.add_up(out)
