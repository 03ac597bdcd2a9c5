"""The attention half of a layer: projections, QK norm and rotary position, packed attention, sigmoid gates.

Promises: per-token work in blocks of one modality in packed order; the kernel choice is the dispatcher's.
Query head h uses key head h // (query heads / key heads). Over several ranks it attends with its own heads to
all tokens, and projects its own tokens with its own share of the matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels import dispatch
from magi2.config import ModelConfig
from magi2.model.linear import ModalityLinear, ModalityNorm, parameter
from magi2.model.tokens import Tokens
from magi2.parallel import ulysses
from magi2.parallel.groups import Groups
from magi2.parallel.ulysses import Heads


class Projected(NamedTuple):
    """Queries, keys and values ready for attention, [L, heads, D], and the gate logits [L, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor


class Attention(nn.Module):
    """Packed self-attention of one layer; `num_modalities` weight sets.

    `groups` and `head_counts` (of queries, keys, values) are this rank's; one device has all heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_modalities: int,
        dtype: torch.dtype,
        *,
        flash_attn_version: int | None = None,
    ) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.width, self.head_dim = width, head_dim
        self.head_counts = (config.num_heads, config.num_query_groups, config.num_query_groups)
        self.softcap = config.attn_softcap
        self.flash_attn_version = flash_attn_version
        self.groups = Groups()
        self.pre_norm = ModalityNorm(width, num_modalities)
        self.linear_g = ModalityLinear(width, config.num_heads, num_modalities, dtype)
        self.linear_qkv = ModalityLinear(width, sum(self.head_counts) * head_dim, num_modalities, dtype)
        self.linear_proj = ModalityLinear(width, width, num_modalities, dtype)
        self.q_norm = ModalityNorm(head_dim, num_modalities)
        self.k_norm = ModalityNorm(head_dim, num_modalities)
        self.sinks = parameter(config.sink_token_num, config.num_heads, dtype=torch.float32)

    def forward(self, x_LC: Tensor, tokens: Tokens) -> Tensor:
        """Return the half's output [L, C] in the dtype of its input."""
        projected = self.project(x_LC, tokens)
        core_LHD = self.attend(projected, tokens)
        return self.finish(core_LHD, projected.gate, tokens)

    def project(self, x_LC: Tensor, tokens: Tokens) -> Projected:
        """Norm the input, project it, and bring queries and keys into place."""
        q, k, v = (x_LC.new_empty(tokens.num_tokens, heads, self.head_dim) for heads in self.head_counts)
        gate = x_LC.new_empty(tokens.num_tokens, self.head_counts[0])
        sizes = [heads * self.head_dim for heads in self.head_counts]
        for start, stop, modality in tokens.blocks:
            rows = slice(start, stop)
            a = dispatch.rms_norm(x_LC[rows], self.pre_norm.weight_of(modality))
            gate[rows] = self.linear_g(a, modality)
            parts = torch.split(self.linear_qkv(a, modality), sizes, dim=1)
            raw_q, raw_k, raw_v = (p.reshape(stop - start, -1, self.head_dim) for p in parts)
            dispatch.norm_rope(raw_q, self.q_norm.weight_of(modality), tokens.rope[rows], q[rows])
            dispatch.norm_rope(raw_k, self.k_norm.weight_of(modality), tokens.rope[rows], k[rows])
            v[rows] = raw_v
        return Projected(q, k, v, gate)

    def attend(self, projected: Projected, tokens: Tokens) -> Tensor:
        """Attend inside the segments; the sinks are in the result, the gates are not."""
        sp = self.groups.sp
        if sp.size == 1:
            return self._attend_to(Heads(projected.q, projected.k, projected.v), self.sinks, tokens)
        coming = ulysses.send_tokens(sp, projected.q, projected.k, projected.v, tokens.lengths)
        sinks = torch.split(ulysses.own_heads(sp, self.sinks), [part.counts[0] for part in coming], dim=1)
        going = []
        for part, own_sinks in zip(coming, sinks, strict=True):
            core_LHD = self._attend_to(part.wait(), own_sinks, tokens)
            # It travels back while the next heads are attended to.
            going.append(ulysses.return_tokens(sp, core_LHD, tokens.lengths))
        return ulysses.all_heads([part.wait() for part in going])

    def _attend_to(self, heads: Heads, sinks: Tensor, tokens: Tokens) -> Tensor:
        return dispatch.attend(
            heads.q,
            heads.k,
            heads.v,
            sinks,
            bounds=tokens.segment_bounds,
            softcap=self.softcap,
            flash_attn_version=self.flash_attn_version,
        )

    def finish(self, core_LHD: Tensor, gate_LH: Tensor, tokens: Tokens) -> Tensor:
        """Gate every head of a token and project."""
        out = core_LHD.new_empty(tokens.num_tokens, self.width)
        for start, stop, modality in tokens.blocks:
            gated = core_LHD[start:stop] * torch.sigmoid(gate_LH[start:stop])[..., None]
            out[start:stop] = self.linear_proj(gated.flatten(1), modality)
        return self.groups.tp.add_up(out)
