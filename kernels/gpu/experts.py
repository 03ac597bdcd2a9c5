"""Routed experts on a CUDA device: sort, run tiles of one expert, add up the slots of a token.

Promises: as `kernels.mh_moe.routed_experts` for bf16: equal roundings, slots added in order in fp32, equal
bits for equal inputs, no host read. Two kernels run tiles: the Hopper one and a plain Triton one, chosen by
the caller. Work space is a row for every route of a few MoE heads. It takes sizes that `kernels.dispatch`
has checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.routing import Tiles, sort_into_tiles
from kernels.mh_moe import ExpertWeights, Routes

_TILE_ROWS = 128
# Routes at a time, whole MoE heads: 1.2 GB of rows at width 256, and still thousands of tiles.
_MAX_ROUTES = 2_300_000


def routed_experts(name: str, x_LGD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Run the chosen experts with the kernel of that name and sum their weighted results.

    Args:
        name: `hopper` or `triton`.
        x_LGD: bf16; the last dim dense.
        routes: Of the same tokens and MoE heads.
        weights: bf16, dense, of the same MoE heads.

    Returns:
        bf16 [L, G, D], dense.
    """
    length, num_heads, _ = x_LGD.shape
    num_experts, top_k = weights.gate.shape[0] // num_heads, routes.experts.shape[2]
    run = run_tiles
    if name == "hopper":
        # Gluon's interface is experimental: only those who chose this kernel import it.
        from kernels.gpu import experts_hopper

        run = experts_hopper.run_tiles
    out = torch.empty(x_LGD.shape, dtype=x_LGD.dtype, device=x_LGD.device)
    step = max(1, _MAX_ROUTES // max(1, length * top_k))
    for first in range(0, num_heads if length else 0, step):
        heads = slice(first, min(first + step, num_heads))
        flat = slice(heads.start * num_experts, heads.stop * num_experts)
        own = Routes(*(r[heads].contiguous() for r in routes))
        tiles = sort_into_tiles(own.experts, num_experts, _TILE_ROWS)
        results = x_LGD.new_empty(own.experts.numel(), x_LGD.shape[2])
        run(
            x_LGD[:, heads],
            own.weights,
            ExpertWeights(*(w[flat].contiguous() for w in weights)),
            tiles,
            results,
        )
        sum_slots(results, out[:, heads], top_k)
    return out


def run_tiles(
    x_LGD: Tensor, scales_GLK: Tensor, weights: ExpertWeights, tiles: Tiles, results: Tensor
) -> None:
    """Write the weighted row of every route, at its flat place (MoE head, token, slot)."""
    length, num_heads, width = x_LGD.shape
    _run[(tiles.bound,)](
        x_LGD,
        tiles.order,
        scales_GLK,
        weights.gate,
        weights.up,
        weights.down,
        results,
        tiles.expert,
        tiles.start,
        tiles.stop,
        tiles.total,
        x_LGD.stride(0),
        x_LGD.stride(1),
        weights.gate.shape[0] // num_heads,
        length,
        scales_GLK.shape[2],
        width=width,
        width_inner=weights.gate.shape[2],
        rows=_TILE_ROWS,
        inner=32,
        num_warps=8,
        num_stages=3,
    )


def sum_slots(results: Tensor, into_LGD: Tensor, top_k: int) -> None:
    """Add the K rows of every token and MoE head in slot order, in fp32, into [L, G, D]."""
    length, num_heads, width = into_LGD.shape
    rows = 16
    _sum[(triton.cdiv(length, rows), num_heads)](
        results,
        into_LGD,
        length,
        into_LGD.stride(0),
        into_LGD.stride(1),
        width=width,
        top_k=top_k,
        rows=rows,
        num_warps=4,
    )


@triton.jit
def _run(
    x_ptr,
    order,
    scales,
    gate_ptr,
    up_ptr,
    down_ptr,
    out,
    tile_expert,
    tile_start,
    tile_stop,
    num_tiles,
    stride_token,
    stride_head,
    num_experts,
    length,
    top_k,
    width: tl.constexpr,
    width_inner: tl.constexpr,
    rows: tl.constexpr,
    inner: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        expert = tl.load(tile_expert + tile)
        head = expert // num_experts
        places = tl.load(tile_start + tile) + tl.arange(0, rows)
        is_real = places < tl.load(tile_stop + tile)
        route = tl.load(order + places, mask=is_real, other=0)
        token = (route // top_k - head * length).to(tl.int64)
        cols = tl.arange(0, width)
        inners = tl.arange(0, inner)
        sources = x_ptr + token * stride_token + head.to(tl.int64) * stride_head
        x = tl.load(sources[:, None] + cols[None, :], mask=is_real[:, None], other=0.0)
        matrix = expert.to(tl.int64) * (width * width_inner)
        gates = gate_ptr + matrix + cols[:, None] * width_inner + inners[None, :]
        ups = up_ptr + matrix + cols[:, None] * width_inner + inners[None, :]
        downs = down_ptr + matrix + inners[:, None] * width + cols[None, :]
        acc = tl.zeros([rows, width], tl.float32)
        for first in range(0, width_inner, inner):
            gate = tl.minimum(tl.dot(x, tl.load(gates + first)), 7.0)
            up = tl.minimum(tl.maximum(tl.dot(x, tl.load(ups + first)), -7.0), 7.0)
            hidden = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
            acc = tl.dot(hidden.to(tl.bfloat16), tl.load(downs + first * width), acc)
        acc *= tl.load(scales + route)[:, None]
        targets = out + route.to(tl.int64) * width
        tl.store(targets[:, None] + cols[None, :], acc.to(tl.bfloat16), mask=is_real[:, None])


@triton.jit
def _sum(
    results,
    out,
    length,
    stride_token,
    stride_head,
    width: tl.constexpr,
    top_k: tl.constexpr,
    rows: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * rows + tl.arange(0, rows)
    is_real = (tokens < length)[:, None]
    cols = tl.arange(0, width)[None, :]
    own = results + (head * length + tokens)[:, None] * (top_k * width) + cols
    total = tl.load(own, mask=is_real, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, top_k):
        total += tl.load(own + slot * width, mask=is_real, other=0.0).to(tl.float32)
    targets = out + tokens.to(tl.int64)[:, None] * stride_token + head * stride_head + cols
    tl.store(targets, total.to(tl.bfloat16), mask=is_real)
