"""Sequence parallelism: tokens for heads and back, around attention and around the experts.

Promises: one exchange for queries, keys and values together; uneven lengths are host integers, so nothing
reads a device; heads that only pad a rank's share are neither stored nor sent. A group of one returns what it
was given. It computes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi2.parallel.groups import Group, Pending


class Heads(NamedTuple):
    """Queries, keys and values of all tokens for this rank's heads."""

    q: Tensor
    k: Tensor
    v: Tensor


def gather_tokens(group: Group, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, lengths: Sequence[int]) -> Heads:
    """Trade own tokens of all heads for all tokens of own heads, in one exchange.

    Args:
        group: P ranks; rank p gets the p-th block of heads.
        q_LHD, k_LHD, v_LHD: One dtype, this rank's tokens. Fewer key heads than ranks are repeated first.
        lengths: Tokens of every rank, in packed order.
    Source: the reference, inference/infra/parallelism. Differs: nothing is padded.
    """
    if group.size == 1:
        return Heads(q_LHD, k_LHD, v_LHD)
    if k_LHD.shape[1] % group.size:
        repeats = group.size // k_LHD.shape[1]
        k_LHD, v_LHD = (x.repeat_interleave(repeats, dim=1) for x in (k_LHD, v_LHD))
    counts = [x.shape[1] // group.size for x in (q_LHD, k_LHD, v_LHD)]
    own, width, head_dim = q_LHD.shape[0], sum(counts), q_LHD.shape[2]
    send = q_LHD.new_empty(group.size, own, width, head_dim)
    parts = torch.split(send, counts, dim=2)
    for part, x in zip(parts, (q_LHD, k_LHD, v_LHD), strict=True):
        part.copy_(x.view(own, group.size, -1, head_dim).transpose(0, 1))
    row = width * head_dim
    received = group.exchange(
        send.view(-1),
        [own * row] * group.size,
        (sum(lengths), width, head_dim),
        [length * row for length in lengths],
    ).wait()
    return Heads(*torch.split(received, counts, dim=1))


def return_tokens(group: Group, x_LHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Trade all tokens of own heads back for own tokens of all heads."""
    return to_tokens(group, x_LHD, lengths, [x_LHD.shape[1]] * group.size)


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
