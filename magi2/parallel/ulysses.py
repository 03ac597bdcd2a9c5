"""Sequence parallelism: tokens for heads and back, around attention and around the experts.

Promises: queries, keys and values travel in one exchange; uneven lengths are host integers, so nothing
reads a device; heads that only pad a rank's share are neither stored nor sent. A group of one returns what it
was given. It computes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi2.parallel.groups import Group, Pending


class Heads(NamedTuple):
    """Queries, keys and values of all tokens for this rank's heads, or some of them."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class Coming:
    """Some of this rank's heads on their way; `counts` are those of queries, keys and values."""

    pending: Pending
    counts: tuple[int, int, int]

    def wait(self) -> Heads:
        """Return them, once only; on CUDA the current stream waits."""
        return Heads(*torch.split(self.pending.wait(), list(self.counts), dim=1))


def send_tokens(
    group: Group, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, lengths: Sequence[int]
) -> list[Coming]:
    """Start to trade own tokens of all heads for all tokens of own heads.

    Queries, keys and values travel together; on a device with streams in two exchanges, if a rank has several
    key heads, so that the second half travels while the first is attended to.

    Args:
        group: P ranks; rank p gets the p-th block of heads.
        q_LHD, k_LHD, v_LHD: One dtype, this rank's tokens. Fewer key heads than ranks are repeated first.
        lengths: Tokens of every rank, in packed order.
    Source: the reference, inference/infra/parallelism. Differs: nothing is padded; two exchanges.
    """
    if k_LHD.shape[1] % group.size:
        repeats = group.size // k_LHD.shape[1]
        k_LHD, v_LHD = (x.repeat_interleave(repeats, dim=1) for x in (k_LHD, v_LHD))
    own, head_dim = q_LHD.shape[0], q_LHD.shape[2]
    # [own, rank, heads of a rank, D] each.
    blocks = [x.view(own, group.size, -1, head_dim) for x in (q_LHD, k_LHD, v_LHD)]
    first, coming = 0, []
    for keys in halves(blocks[1].shape[2], q_LHD.device):
        per_key = [block.shape[2] // blocks[1].shape[2] for block in blocks]
        parts = [
            block[:, :, first * each : (first + keys) * each]
            for block, each in zip(blocks, per_key, strict=True)
        ]
        counts = (keys * per_key[0], keys, keys)
        coming.append(Coming(_exchange_heads(group, parts, counts, lengths), counts))
        first += keys
    return coming


def halves(num_keys: int, device: torch.device) -> list[int]:
    """Return how many of a rank's key heads each exchange brings.

    On a CPU nothing would overlap, and its products of few heads may round otherwise.
    """
    if num_keys == 1 or device.type == "cpu":
        return [num_keys]
    return [num_keys - num_keys // 2, num_keys // 2]


def _exchange_heads(
    group: Group, parts: Sequence[Tensor], counts: Sequence[int], lengths: Sequence[int]
) -> Pending:
    """Start one exchange of queries, keys and values, [own, rank, heads, D] each, to [L, heads, D]."""
    own, head_dim = parts[0].shape[0], parts[0].shape[3]
    row = sum(counts) * head_dim
    send = parts[0].new_empty(group.size, own, sum(counts), head_dim)
    for place, part in zip(torch.split(send, list(counts), dim=2), parts, strict=True):
        place.copy_(part.transpose(0, 1))
    return group.exchange(
        send.view(-1),
        [own * row] * group.size,
        (sum(lengths), sum(counts), head_dim),
        [length * row for length in lengths],
    )


def return_tokens(group: Group, x_LHD: Tensor, lengths: Sequence[int]) -> Pending:
    """Start to trade all tokens of some own heads back for own tokens of those heads of every rank.

    Returns:
        [rank, own, heads, D], once it has come.
    """
    own, heads, head_dim = lengths[group.position], x_LHD.shape[1], x_LHD.shape[2]
    row = heads * head_dim
    return group.exchange(
        x_LHD.reshape(-1),
        [length * row for length in lengths],
        (group.size, own, heads, head_dim),
        [own * row] * group.size,
    )


def all_heads(parts: Sequence[Tensor]) -> Tensor:
    """Put the heads of all ranks into order, from [rank, own, some heads, D] of each exchange."""
    return torch.cat([part.transpose(0, 1) for part in parts], dim=2).flatten(1, 2)


def own_heads(group: Group, sinks: Tensor) -> Tensor:
    """Return this rank's columns of the sinks, [sink tokens, H]."""
    return sinks.chunk(group.size, dim=1)[group.position]


def to_heads(group: Group, x_LGD: Tensor, lengths: Sequence[int], heads: Sequence[int]) -> Pending:
    """Start to trade own tokens of all MoE heads for all tokens of own MoE heads.

    Args:
        group: Ranks that own different MoE heads.
        x_LGD: This rank's tokens.
        lengths: Tokens of every rank of the group.
        heads: MoE heads of every rank of the group; the last ones may own none.
    """
    if group.size == 1:
        return Pending(x_LGD)
    own, dim = x_LGD.shape[0], x_LGD.shape[2]
    mine = heads[group.position]
    send = torch.cat([part.reshape(-1) for part in torch.split(x_LGD, list(heads), dim=1)])
    return group.exchange(
        send,
        [own * count * dim for count in heads],
        (sum(lengths), mine, dim),
        [length * mine * dim for length in lengths],
    )


def to_tokens(group: Group, x_LGD: Tensor, lengths: Sequence[int], heads: Sequence[int]) -> Tensor:
    """Trade all tokens of own heads back for own tokens of all heads; the reverse of `to_heads`."""
    if group.size == 1:
        return x_LGD
    own, mine, dim = lengths[group.position], x_LGD.shape[1], x_LGD.shape[2]
    counts = [own * count * dim for count in heads]
    received = group.exchange(
        x_LGD.reshape(-1), [length * mine * dim for length in lengths], (sum(counts),), counts
    ).wait()
    pieces = torch.split(received, counts)
    return torch.cat([piece.view(own, count, dim) for piece, count in zip(pieces, heads, strict=True)], dim=1)
