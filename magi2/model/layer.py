"""One layer: hyper-connections around attention, then around a dense MLP or a mixture of experts."""

import torch
from torch import Tensor

from magi2.config import ModelConfig
from magi2.model.attention import Attention
from magi2.model.mhc import Reading, StreamMixer
from magi2.model.mlp import DenseMLP
from magi2.model.moe import MoE
from magi2.model.tokens import Tokens


class Layer(StreamMixer):
    """Layer `index` of the model, with the weight sets that its place in the two layer lists asks for."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, *, flash_attn_version: int | None = None
    ) -> None:
        num_modalities = config.attention_modalities(index)
        super().__init__(config, num_modalities)
        self.attention = Attention(config, num_modalities, dtype, flash_attn_version=flash_attn_version)
        is_moe = index in config.moe.layers
        self.mlp = MoE(config, dtype) if is_moe else DenseMLP(config, num_modalities, dtype)

    def forward(self, s_LSC: Tensor, tokens: Tokens) -> Tensor:
        """Update the streams in place and return them."""
        reading = self.begin(s_LSC, tokens)
        return self.end(s_LSC, reading, self.mlp(reading.x, tokens), tokens)

    def begin(self, s_LSC: Tensor, tokens: Tokens) -> Reading:
        """Run the attention half and return what the other half reads."""
        reading = self.read(s_LSC, "attn", tokens)
        self.write(s_LSC, reading.gates, self.attention(reading.x, tokens), tokens)
        return self.read(s_LSC, "mlp", tokens)

    def end(self, s_LSC: Tensor, reading: Reading, out_LC: Tensor, tokens: Tokens) -> Tensor:
        """Add the second half's output to the streams, in place; needs no weights."""
        self.write(s_LSC, reading.gates, out_LC, tokens)
        return s_LSC
