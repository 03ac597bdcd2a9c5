"""Which part of a stored tensor a rank owns, under tensor parallelism and by MoE heads.

Promises: a pure function of a tensor's name and the rank's place, used for the shapes of a model without
memory and for reading; query, key and value rows are cut inside each modality's copy, gates stay with their
linear rows. A cut along one range of dim 0 is a view, so that it stays in the mapped file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from magi2.config import NUM_MODALITIES, ModelConfig
from magi2.parallel.groups import Groups
from magi2.parallel.layout import head_counts, span

_COLUMNS = (
    "attention.linear_proj.weight",
    "attention.sinks",
    "mlp.down_proj.weight",
    "mlp.merge_linear.weight",
    "mlp.shared_expert_fc2.weight",
    "mlp.modality_specific_shared_expert_fc2.weight",
)
_EXPERTS = ".mlp.moe_mlp."


@dataclass(frozen=True)
class Cut:
    """The parts of a stored tensor, [start, stop) along one dim, that make a rank's own."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rank's own tensor: a view where one range of rows is all."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if len(parts) > 1:
            return torch.cat(parts, dim=self.dim)
        return parts[0] if self.dim == 0 else parts[0].contiguous()


class Share(NamedTuple):
    """One of several equal shares of a cut."""

    place: int
    of: int


def cut_of(name: str, shape: tuple[int, ...], config: ModelConfig, groups: Groups) -> Cut | None:
    """Return the part of a tensor that this rank owns; None means the whole.

    Args:
        name: As the checkpoint spells it.
        shape: As stored.
        config: Of the model.
        groups: Of this rank.
    """
    if _EXPERTS in name:
        counts = head_counts(config.moe.num_heads, groups.layout.expert_ranks)
        if len(counts) == 1:
            return None
        first, last = span(counts, groups.ep.position)
        return Cut(0, ((first * config.moe.num_experts, last * config.moe.num_experts),))
    share = Share(groups.tp.position, groups.tp.size)
    if share.of == 1:
        return None
    if name.endswith(_COLUMNS):
        return Cut(1, (_range(0, shape[1], share),))
    rows = _row_blocks(name, shape, config)
    if rows is None:
        return None
    bounds = [0, *accumulate(rows)]
    return Cut(0, tuple(_range(start, size, share) for start, size in zip(bounds, rows, strict=False)))


def _row_blocks(name: str, shape: tuple[int, ...], config: ModelConfig) -> list[int] | None:
    """Return the sizes of the blocks of rows that are cut one by one; None for what is replicated."""
    parts = name.split(".")
    if len(parts) < 5 or parts[0] != "block":
        return None
    copies = config.attention_modalities(int(parts[2]))
    match parts[-2]:
        case "linear_qkv":
            heads = (config.num_heads, config.num_query_groups, config.num_query_groups)
            return [count * config.head_dim for count in heads] * copies
        case "linear_g" | "up_gate_proj":
            return [shape[0] // copies] * copies
        case "split_linear" | "shared_expert_fc1":
            return [shape[0]]
        case "modality_specific_shared_expert_fc1":
            return [shape[0] // NUM_MODALITIES] * NUM_MODALITIES
    return None


def _range(start: int, size: int, share: Share) -> tuple[int, int]:
    own = size // share.of
    return start + share.place * own, start + (share.place + 1) * own
