"""The mixture-of-experts half of a layer: routed experts per MoE head, a shared expert and one per modality.

Promises: nothing is dropped and no token depends on another. The router chooses by the averaged bias, which
the loader puts in place of the raw one, and weights by the score alone. The pre-norm and the modality
experts always have one weight set per modality. Over several ranks each runs its own MoE heads: for all
tokens of its group, which travel while the shared experts run, or cut with the matrices, with one sum at the
end.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.mh_moe import ExpertWeights, Routes
from magi2.config import NUM_MODALITIES, ModelConfig
from magi2.model.linear import ModalityLinear, ModalityNorm, parameter
from magi2.model.tokens import Tokens
from magi2.parallel import ulysses
from magi2.parallel.groups import Groups
from magi2.parallel.layout import head_counts


class Router(nn.Module):
    """The bias of every expert, fp32 [G * E]; the forward reads `expert_bias` alone."""

    expert_bias: Tensor
    expert_bias_ema: Tensor

    def __init__(self, num_flat_experts: int) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.empty(num_flat_experts, dtype=torch.float32))
        self.register_buffer("expert_bias_ema", torch.empty(num_flat_experts, dtype=torch.float32))


class MultiHeadExperts(nn.Module):
    """Gates and experts of all MoE heads; flat index = MoE head * E + expert, matrices input-major."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.settings = config.moe
        num_flat = config.moe.num_heads * config.moe.num_experts
        width, inner = config.moe_head_dim, config.moe.expert_width
        self.gate = parameter(num_flat, width, dtype=torch.float32)
        self.W_gate = parameter(num_flat, width, inner, dtype=dtype)
        self.W_up = parameter(num_flat, width, inner, dtype=dtype)
        self.W_down = parameter(num_flat, inner, width, dtype=dtype)
        self.router = Router(num_flat)

    def forward(self, x_LGD: Tensor) -> Tensor:
        """Route and run; [L, G, D] in and out, with the MoE heads of this rank, which may be none."""
        if x_LGD.shape[1] == 0:
            return x_LGD
        return dispatch.routed_experts(
            x_LGD, self.route(x_LGD), ExpertWeights(self.W_gate, self.W_up, self.W_down)
        )

    def route(self, x_LGD: Tensor) -> Routes:
        """Choose the experts of every token and MoE head."""
        num_heads = x_LGD.shape[1]
        return dispatch.route(
            x_LGD,
            self.gate.view(num_heads, -1, self.gate.shape[1]),
            self.router.expert_bias.view(num_heads, -1),
            top_k=self.settings.top_k,
            route_norm=self.settings.route_norm,
            route_scale=self.settings.route_scale,
        )


class Sent(NamedTuple):
    """What the shared experts gave, [L, C], and what came for this rank's MoE heads, [L, G, D]."""

    out: Tensor
    heads: Tensor


class MoE(nn.Module):
    """Routed path between a split and a merge projection, plus the two shared paths."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, routed, moe = config.hidden_size, config.routed_width, config.moe
        self.groups = Groups()
        self.num_heads = moe.num_heads
        self.head_dim = config.moe_head_dim
        self.pre_norm = ModalityNorm(width, NUM_MODALITIES)
        self.split_linear = ModalityLinear(width, routed, 1, dtype)
        self.merge_linear = ModalityLinear(routed, width, 1, dtype)
        self.shared_expert_fc1 = ModalityLinear(width, 2 * moe.shared_width, 1, dtype)
        self.shared_expert_fc2 = ModalityLinear(moe.shared_width, width, 1, dtype)
        self.modality_specific_shared_expert_fc1 = ModalityLinear(
            width, 2 * moe.modality_width, NUM_MODALITIES, dtype
        )
        self.modality_specific_shared_expert_fc2 = ModalityLinear(
            moe.modality_width, width, NUM_MODALITIES, dtype
        )
        self.moe_mlp = MultiHeadExperts(config, dtype)

    def forward(self, x_LC: Tensor, tokens: Tokens) -> Tensor:
        """Return the half's output [L, C] in the dtype of its input."""
        sent = self.begin(x_LC, tokens)
        return self.finish(sent.out, self.moe_mlp(sent.heads), tokens)

    def begin(self, x_LC: Tensor, tokens: Tokens) -> Sent:
        """Send the tokens to their MoE heads and run the shared experts meanwhile."""
        out_LC = torch.empty_like(x_LC)
        heads_LGD = x_LC.new_empty(tokens.num_tokens, self.num_heads, self.head_dim)
        for start, stop, modality in tokens.blocks:
            a = dispatch.rms_norm(x_LC[start:stop], self.pre_norm.weight_of(modality))
            heads_LGD[start:stop] = self.split_linear(a, modality).unflatten(1, (self.num_heads, -1))
            out_LC[start:stop] = a
        group, counts = self.groups.dispatch, head_counts(self.num_heads, self.groups.dispatch.size)
        # The tokens travel to their MoE heads while the shared experts run.
        coming = ulysses.to_heads(group, heads_LGD, tokens.moe_lengths, counts)
        for start, stop, modality in tokens.blocks:
            out_LC[start:stop] = self.shared(out_LC[start:stop], modality)
        return Sent(out_LC, coming.wait())

    def finish(self, out_LC: Tensor, routed_LGD: Tensor, tokens: Tokens) -> Tensor:
        """Bring the experts' results back to their tokens and add them to `out_LC`, in place."""
        group, counts = self.groups.dispatch, head_counts(self.num_heads, self.groups.dispatch.size)
        routed_LGD = ulysses.to_tokens(group, routed_LGD, tokens.moe_lengths, counts)
        for start, stop, modality in tokens.blocks:
            out_LC[start:stop] += self.merge_linear(routed_LGD[start:stop].flatten(1), modality)
        return self.groups.tp.add_up(out_LC)

    def shared(self, a: Tensor, modality: int) -> Tensor:
        """Return the sum of the shared expert and the modality's expert for normed rows of one modality."""
        common = dispatch.activate(self.shared_expert_fc1(a, modality))
        special = dispatch.activate(self.modality_specific_shared_expert_fc1(a, modality))
        common_LC: Tensor = self.shared_expert_fc2(common, modality)
        special_LC: Tensor = self.modality_specific_shared_expert_fc2(special, modality)
        return common_LC + special_LC
