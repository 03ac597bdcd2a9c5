"""Hyper-connections of one layer: its weights, and how each half reads and writes the streams.

Promises: the gates of a half come from the streams as that half found them; blocks of one modality at a
time, so the fp32 state of all tokens never exists at once. Streams are written in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.mhc import Gates, MixingWeights
from magi2.config import ModelConfig
from magi2.model.linear import ModalityNorm, parameter
from magi2.model.tokens import Tokens

HALVES = ("attn", "mlp")


class Reading(NamedTuple):
    """What a half layer reads, [L, C], and the gates [L, S] and [L, S, S] with which it will write."""

    x: Tensor
    gates: Gates


class StreamMixer(nn.Module):
    """The part of a layer that owns the `mhc_*` weights."""

    def __init__(self, config: ModelConfig, num_modalities: int) -> None:
        super().__init__()
        num_streams = config.mhc.num_streams
        for half in HALVES:
            for gate in ("pre", "post", "res"):
                size = (num_streams, num_streams) if gate == "res" else (num_streams,)
                setattr(self, f"mhc_alpha_{gate}_{half}", parameter(1, dtype=torch.float32))
                setattr(self, f"mhc_bias_{gate}_{half}", parameter(*size, dtype=torch.float32))
            phi = parameter(config.stream_width, config.num_mixing, dtype=torch.float32)
            setattr(self, f"mhc_phi_fused_{half}", phi)
        self.mhc_norm = ModalityNorm(config.stream_width, num_modalities)

    def mixing_weights(self, half: str, modality: int) -> MixingWeights:
        """Return the weights of one half for tokens of one modality."""
        return MixingWeights(
            norm=self.mhc_norm.weight_of(modality),
            phi=getattr(self, f"mhc_phi_fused_{half}"),
            alpha_pre=getattr(self, f"mhc_alpha_pre_{half}"),
            alpha_post=getattr(self, f"mhc_alpha_post_{half}"),
            alpha_res=getattr(self, f"mhc_alpha_res_{half}"),
            bias_pre=getattr(self, f"mhc_bias_pre_{half}"),
            bias_post=getattr(self, f"mhc_bias_post_{half}"),
            bias_res=getattr(self, f"mhc_bias_res_{half}"),
        )

    def read(self, s_LSC: Tensor, half: str, tokens: Tokens) -> Reading:
        """Form a half's input from the streams, and the gates for its output."""
        length, num_streams, width = s_LSC.shape
        x_LC = s_LSC.new_empty(length, width)
        pre = s_LSC.new_empty(length, num_streams)
        gates = Gates(pre, torch.empty_like(pre), s_LSC.new_empty(length, num_streams, num_streams))
        for start, stop, modality in tokens.blocks:
            own = Gates(*(g[start:stop] for g in gates))
            weights = self.mixing_weights(half, modality)
            dispatch.read_streams(s_LSC[start:stop], weights, own, x_LC[start:stop])
        return Reading(x_LC, gates)

    def write(self, s_LSC: Tensor, gates: Gates, out_LC: Tensor, tokens: Tokens) -> None:
        """Mix the streams and add a half's output [L, C], in place."""
        for start, stop, _ in tokens.blocks:
            block_gates = Gates(*(g[start:stop] for g in gates))
            dispatch.write_streams(s_LSC[start:stop], block_gates, out_LC[start:stop])
