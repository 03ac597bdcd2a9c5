"""Routing on a CUDA device: expert choice without stored scores, and a stable counting sort by expert.

Promises: the logits are fp32 products (each gate in three bf16 terms, which together are exact), ties go to
the lowest expert, tokens ascend inside an expert, equal inputs give equal bits, and the host reads nothing.
Definitions: `kernels.mh_moe.route` and `kernels.mh_moe.sort_routes`. It runs no expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mh_moe import NORM_EPS, Routes

# Routes counted at a time: a route's place needs a look at those before it in its chunk.
_CHUNK = 128


class Tiles(NamedTuple):
    """Sorted routes cut into tiles of one expert, all int32 on the device.

    Args:
        order: [G*L*K] flat route (MoE head, token, slot) at each sorted place.
        expert: [upper bound] flat expert of each tile; entries from `total` on are unset.
        start: [upper bound] first sorted place of each tile.
        stop: [upper bound] end of the tile's expert, not of the tile.
        total: [1] number of tiles.
        bound: Length of the three lists, known on the host.
    """

    order: Tensor
    expert: Tensor
    start: Tensor
    stop: Tensor
    total: Tensor
    bound: int


def route(
    x_LGD: Tensor, gate_GED: Tensor, bias_GE: Tensor, *, top_k: int, route_norm: bool, route_scale: float
) -> Routes:
    """Choose and weight the experts of every token and MoE head; as `kernels.mh_moe.route`."""
    length, num_heads, width = x_LGD.shape
    num_experts = gate_GED.shape[1]
    shape = (num_heads, length, top_k)
    experts = torch.empty(shape, dtype=torch.int64, device=x_LGD.device)
    weights = torch.empty(shape, dtype=torch.float32, device=x_LGD.device)
    if length == 0:
        return Routes(experts, weights)
    rows = 64  # two programs share a multiprocessor: one chooses while the other multiplies
    _route[(triton.cdiv(length, rows), num_heads)](
        x_LGD,
        _three_terms(gate_GED),
        bias_GE,
        experts,
        weights,
        length,
        x_LGD.stride(0),
        x_LGD.stride(1),
        gate_GED.numel(),
        float(route_scale),
        NORM_EPS,
        num_experts=num_experts,
        width=width,
        top_k=top_k,
        is_normed=route_norm,
        rows=rows,
        inner=64,
        num_warps=4,
        num_stages=2,
    )
    return Routes(experts, weights)


def sort_into_tiles(experts_GLK: Tensor, num_experts: int, rows: int) -> Tiles:
    """Group all routes by flat expert, tokens ascending, and cut every expert into tiles of `rows`."""
    num_heads, length, top_k = experts_GLK.shape
    device, per_head = experts_GLK.device, length * top_k
    chunks = triton.cdiv(per_head, _CHUNK)
    num_flat = num_heads * num_experts
    # Expert-major: one running sum over it gives every chunk's first place for every expert.
    counts = torch.empty(num_flat, chunks, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(num_experts)
    grid = (chunks, num_heads)
    _count[grid](
        experts_GLK,
        counts,
        per_head,
        chunks,
        num_experts=num_experts,
        padded=padded,
        chunk=_CHUNK,
        num_warps=1,
    )
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    order = torch.empty(num_heads * per_head, dtype=torch.int32, device=device)
    rows_placed = 32
    _place[(triton.cdiv(per_head, rows_placed), num_heads)](
        experts_GLK,
        counts,
        ends,
        order,
        per_head,
        chunks,
        num_experts=num_experts,
        chunk=_CHUNK,
        rows=rows_placed,
        num_warps=2,
    )
    bound = num_heads * per_head // rows + num_flat
    tile_expert, start, stop = torch.empty(3, bound, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    _cut[(num_flat,)](
        ends,
        tile_expert,
        start,
        stop,
        count,
        chunks,
        num_flat,
        rows=rows,
        padded=triton.next_power_of_2(num_flat),
    )
    return Tiles(order, tile_expert, start, stop, count, bound)


def _three_terms(gate_GED: Tensor) -> Tensor:
    """Return bf16 [3, G, E, D], largest first, whose exact sum is the fp32 gate."""
    terms = torch.empty(3, *gate_GED.shape, dtype=torch.bfloat16, device=gate_GED.device)
    total = gate_GED.numel()
    _split[(triton.cdiv(total, 1024),)](gate_GED.contiguous(), terms, total, block=1024)
    return terms


@triton.jit
def _split(gate, terms, total, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(gate + at, mask=at < total)
    for k in tl.static_range(3):
        term = value.to(tl.bfloat16)
        tl.store(terms + k * total + at, term, mask=at < total)
        value -= term.to(tl.float32)


@triton.jit
def _route(
    x_ptr,
    terms_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    length,
    stride_token,
    stride_head,
    term_size,
    route_scale,
    norm_eps,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    is_normed: tl.constexpr,
    rows: tl.constexpr,
    inner: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = tl.program_id(0) * rows + tl.arange(0, rows)
    is_real = tokens < length
    experts = tl.arange(0, num_experts)
    inners = tl.arange(0, inner)
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * stride_token + head.to(tl.int64) * stride_head
    gate_rows = terms_ptr + (head * num_experts + experts)[None, :] * width
    logits = tl.zeros([rows, num_experts], tl.float32)
    # Smallest terms first, so that they are not lost against the sum of the largest.
    for step in range(3 * (width // inner)):
        term = 2 - step // (width // inner)
        first = (step % (width // inner)) * inner
        x = tl.load(x_rows + (first + inners)[None, :], mask=is_real[:, None], other=0.0)
        gate = tl.load(gate_rows + term * term_size + (first + inners)[:, None])
        logits = tl.dot(x, gate, logits)
    bias = bias_ptr + head * num_experts
    biased = tl.sigmoid(logits) + tl.load(bias + experts)[None, :]
    slots = tl.arange(0, 8)
    chosen = tl.zeros([rows, 8], tl.int32)
    kept = tl.zeros([rows, 8], tl.float32)
    # Not unrolled, and the score is won back from the biased one (exact to its last place): a second array of
    # scores would not fit into registers.
    for slot in range(top_k):
        best = tl.max(biased, axis=1)
        index = tl.min(tl.where(biased == best[:, None], experts[None, :], num_experts - 1), axis=1)
        biased = tl.where(experts[None, :] == index[:, None], float("-inf"), biased)
        score = best - tl.load(bias + index)
        chosen = tl.where(slots[None, :] == slot, index[:, None], chosen)
        kept = tl.where(slots[None, :] == slot, score[:, None], kept)
    if is_normed:
        kept = kept / tl.maximum(tl.sum(kept, axis=1), norm_eps)[:, None]
    kept *= route_scale
    places = (head.to(tl.int64) * length + tokens)[:, None] * top_k + slots[None, :]
    is_kept = is_real[:, None] & (slots < top_k)[None, :]
    tl.store(experts_ptr + places, chosen.to(tl.int64), mask=is_kept)
    tl.store(weights_ptr + places, kept, mask=is_kept)


@triton.jit
def _count(
    experts_ptr,
    counts,
    per_head,
    chunks,
    num_experts: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    at = block * chunk + tl.arange(0, chunk)
    expert = tl.load(experts_ptr + head.to(tl.int64) * per_head + at, mask=at < per_head, other=0).to(
        tl.int32
    )
    found = tl.histogram(expert, padded, mask=at < per_head)
    bins = tl.arange(0, padded)
    tl.store(counts + (head * num_experts + bins) * chunks + block, found, mask=bins < num_experts)


@triton.jit
def _place(
    experts_ptr,
    counts,
    ends,
    order,
    per_head,
    chunks,
    num_experts: tl.constexpr,
    chunk: tl.constexpr,
    rows: tl.constexpr,
):
    """Place `rows` routes behind those of their expert in earlier chunks and earlier in their own chunk."""
    head = tl.program_id(1)
    first_row = tl.program_id(0) * rows
    block = first_row // chunk
    local = tl.arange(0, rows)
    at = first_row + local
    own = experts_ptr + head.to(tl.int64) * per_head
    expert = tl.load(own + at, mask=at < per_head, other=-1).to(tl.int32)
    before = tl.zeros([rows], tl.int32)
    for first in range(block * chunk, first_row + rows, rows):
        others = first + local
        other = tl.load(own + others, mask=others < per_head, other=-1).to(tl.int32)
        is_equal = (expert[:, None] == other[None, :]) & (others[None, :] < at[:, None])
        before += tl.sum(is_equal.to(tl.int32), axis=1)
    is_real = at < per_head
    cell = (head * num_experts + expert) * chunks + block
    first_place = tl.load(ends + cell, mask=is_real, other=0) - tl.load(counts + cell, mask=is_real, other=0)
    tl.store(order + first_place + before, head * per_head + at, mask=is_real)


@triton.jit
def _cut(
    ends,
    tile_expert,
    tile_start,
    tile_stop,
    count,
    chunks,
    num_flat,
    rows: tl.constexpr,
    padded: tl.constexpr,
):
    own = tl.program_id(0)
    every = tl.arange(0, padded)
    is_before = every < own
    stops = tl.load(ends + (every + 1) * chunks - 1, mask=is_before, other=0)
    starts = tl.load(ends + every * chunks - 1, mask=is_before & (every > 0), other=0)
    first = tl.sum((stops - starts + rows - 1) // rows, axis=0)
    start = tl.load(ends + own * chunks - 1, mask=own > 0, other=0)
    stop = tl.load(ends + (own + 1) * chunks - 1)
    num_tiles = (stop - start + rows - 1) // rows
    for k in range(num_tiles):
        tl.store(tile_expert + first + k, own)
        tl.store(tile_start + first + k, start + k * rows)
        tl.store(tile_stop + first + k, stop)
    if own == num_flat - 1:
        tl.store(count, first + num_tiles)
