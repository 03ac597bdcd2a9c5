"""Hyper-connections of four streams on a CUDA device: gates, reading the streams, writing them back.

Promises: as `kernels.mhc`; no fp32 copy of the streams, equal bits for equal inputs. The norm weight is
folded into phi, which enters as two bf16 terms (16 bits of it: 2**-18 relative, far under the bf16 gates).
The streams are read twice for gates and input, and once, in place, for writing. It cuts no blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mhc import SINKHORN_EPS, SINKHORN_ITERATIONS, Gates, MixingWeights
from kernels.rms_norm import EPS

NUM_STREAMS = 4
# 4 + 4 + 16 logits and one sum of squares, padded.
_COLUMNS = 32


def gates(s_LSC: Tensor, weights: MixingWeights, into: Gates) -> None:
    """Write the gates of one half layer; as `kernels.mhc.gates`, the streams dense and bf16."""
    length, _, width = s_LSC.shape
    terms = torch.empty(NUM_STREAMS * width, 2 * _COLUMNS, dtype=torch.bfloat16, device=s_LSC.device)
    _fold[(triton.cdiv(NUM_STREAMS * width, 64),)](
        weights.norm, weights.phi, terms, NUM_STREAMS * width, num_logits=24, columns=_COLUMNS, rows=64
    )
    sums = torch.empty(NUM_STREAMS, length, _COLUMNS, dtype=torch.float32, device=s_LSC.device)
    rows = 64
    _products[(triton.cdiv(length, rows), NUM_STREAMS)](
        s_LSC,
        terms,
        sums,
        length,
        width,
        num_logits=24,
        columns=_COLUMNS,
        rows=rows,
        inner=64,
        num_warps=4,
        num_stages=4,
    )
    _gates[(triton.cdiv(length, 128),)](
        sums,
        weights.alpha_pre,
        weights.alpha_post,
        weights.alpha_res,
        weights.bias_pre,
        weights.bias_post,
        weights.bias_res,
        into.pre,
        into.post,
        into.res,
        length,
        NUM_STREAMS * width,
        1 / math.sqrt(NUM_STREAMS * width),
        EPS,
        SINKHORN_EPS,
        columns=_COLUMNS,
        iterations=SINKHORN_ITERATIONS,
        rows=128,
        num_warps=4,
    )


def pre_mix(s_LSC: Tensor, pre_LS: Tensor, into_LC: Tensor) -> None:
    """Write the weighted sum of the streams of each token; as `kernels.mhc.pre_mix`, all dense and bf16."""
    length, _, width = s_LSC.shape
    _pre_mix[(length,)](s_LSC, pre_LS, into_LC, width, block=1024, num_warps=4)


def post_mix(s_LSC: Tensor, gate: Gates, out_LC: Tensor) -> None:
    """Mix the streams in place and add the half layer's output; as `kernels.mhc.post_mix`, dense and bf16."""
    length, _, width = s_LSC.shape
    _post_mix[(length,)](s_LSC, gate.res, gate.post, out_LC, width, block=1024, num_warps=4)


@triton.jit
def _fold(norm, phi, terms, size, num_logits: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr):
    """Write bf16 [size, 2 * columns]: phi times the norm weight, rounded, then what the rounding lost."""
    at = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    cols = tl.arange(0, columns)[None, :]
    is_real = (at < size) & (cols < num_logits)
    value = tl.load(phi + at * num_logits + cols, mask=is_real, other=0.0)
    value *= 1.0 + tl.load(norm + at, mask=at < size, other=0.0)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    tl.store(terms + at * (2 * columns) + cols, high, mask=at < size)
    tl.store(terms + at * (2 * columns) + columns + cols, low, mask=at < size)


@triton.jit
def _products(
    streams,
    terms,
    sums,
    length,
    width,
    num_logits: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    inner: tl.constexpr,
):
    """Write one stream's share of the logits, and its sum of squares behind them."""
    stream = tl.program_id(1)
    tokens = tl.program_id(0) * rows + tl.arange(0, rows)
    is_real = tokens < length
    inners = tl.arange(0, inner)
    both = tl.arange(0, 2 * columns)
    own = streams + (tokens.to(tl.int64) * 4 + stream)[:, None] * width + inners[None, :]
    matrix = terms + (stream * width + inners)[:, None] * (2 * columns) + both[None, :]
    acc = tl.zeros([rows, 2 * columns], tl.float32)
    squares = tl.zeros([rows, inner], tl.float32)
    for _ in range(0, width, inner):
        x = tl.load(own, mask=is_real[:, None], other=0.0)
        acc = tl.dot(x, tl.load(matrix), acc)
        wide = x.to(tl.float32)
        squares += wide * wide
        own += inner
        matrix += inner * 2 * columns
    logits = tl.sum(tl.reshape(acc, [rows, 2, columns]), axis=1)
    cols = tl.arange(0, columns)
    logits = tl.where((cols == num_logits)[None, :], tl.sum(squares, axis=1)[:, None], logits)
    places = (stream * length + tokens).to(tl.int64)[:, None] * columns + cols[None, :]
    tl.store(sums + places, logits, mask=is_real[:, None])


@triton.jit
def _total(sums, length, columns: tl.constexpr):
    """Add the four streams' shares, in order."""
    total = tl.load(sums)
    for k in tl.static_range(1, 4):
        total += tl.load(sums + k * length * columns)
    return total


@triton.jit
def _gates(
    sums,
    alpha_pre,
    alpha_post,
    alpha_res,
    bias_pre,
    bias_post,
    bias_res,
    pre,
    post,
    res,
    length,
    size,
    factor,
    norm_eps,
    eps,
    columns: tl.constexpr,
    iterations: tl.constexpr,
    rows: tl.constexpr,
):
    # Rows behind the end repeat the last one: equal values, so that they may be stored.
    tokens = tl.minimum(tl.program_id(0) * rows + tl.arange(0, rows), length - 1)
    j = tl.arange(0, 4)
    first = sums + tokens.to(tl.int64) * columns
    own = first[:, None] + j[None, :]
    scale = (tl.rsqrt(_total(first + 24, length, columns) / size + norm_eps) * factor)[:, None]
    targets = tokens.to(tl.int64)[:, None] * 4 + j[None, :]
    z = _total(own, length, columns) * scale
    gate = tl.sigmoid(tl.load(alpha_pre) * z + tl.load(bias_pre + j)[None, :])
    tl.store(pre + targets, gate.to(tl.bfloat16))
    z = _total(own + 4, length, columns) * scale
    gate = 2 * tl.sigmoid(tl.load(alpha_post) * z + tl.load(bias_post + j)[None, :])
    tl.store(post + targets, gate.to(tl.bfloat16))
    alpha = tl.load(alpha_res)
    r0 = alpha * (_total(own + 8, length, columns) * scale) + tl.load(bias_res + j)[None, :]
    r1 = alpha * (_total(own + 12, length, columns) * scale) + tl.load(bias_res + 4 + j)[None, :]
    r2 = alpha * (_total(own + 16, length, columns) * scale) + tl.load(bias_res + 8 + j)[None, :]
    r3 = alpha * (_total(own + 20, length, columns) * scale) + tl.load(bias_res + 12 + j)[None, :]
    peak = tl.max(tl.maximum(tl.maximum(r0, r1), tl.maximum(r2, r3)), axis=1)[:, None]
    r0 = tl.exp(r0 - peak)
    r1 = tl.exp(r1 - peak)
    r2 = tl.exp(r2 - peak)
    r3 = tl.exp(r3 - peak)
    for _ in range(iterations):
        column = r0 + r1 + r2 + r3 + eps
        r0 = r0 / column
        r1 = r1 / column
        r2 = r2 / column
        r3 = r3 / column
        r0 = r0 / (tl.sum(r0, axis=1)[:, None] + eps)
        r1 = r1 / (tl.sum(r1, axis=1)[:, None] + eps)
        r2 = r2 / (tl.sum(r2, axis=1)[:, None] + eps)
        r3 = r3 / (tl.sum(r3, axis=1)[:, None] + eps)
    rows_of_res = res + tokens.to(tl.int64)[:, None] * 16 + j[None, :]
    tl.store(rows_of_res, r0.to(tl.bfloat16))
    tl.store(rows_of_res + 4, r1.to(tl.bfloat16))
    tl.store(rows_of_res + 8, r2.to(tl.bfloat16))
    tl.store(rows_of_res + 12, r3.to(tl.bfloat16))


@triton.jit
def _pre_mix(streams, pre, into, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block)
    for first in range(0, width, block):
        at = first + cols
        is_real = at < width
        own = streams + token * 4 * width + at
        mixed = tl.load(pre + token * 4).to(tl.float32) * tl.load(own, mask=is_real, other=0.0).to(tl.float32)
        for j in tl.static_range(1, 4):
            part = tl.load(own + j * width, mask=is_real, other=0.0).to(tl.float32)
            mixed += tl.load(pre + token * 4 + j).to(tl.float32) * part
        tl.store(into + token * width + at, mixed.to(tl.bfloat16), mask=is_real)


@triton.jit
def _post_mix(streams, res, post, out, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block)
    for first in range(0, width, block):
        at = first + cols
        is_real = at < width
        own = streams + token * 4 * width + at
        s0 = tl.load(own, mask=is_real, other=0.0).to(tl.float32)
        s1 = tl.load(own + width, mask=is_real, other=0.0).to(tl.float32)
        s2 = tl.load(own + 2 * width, mask=is_real, other=0.0).to(tl.float32)
        s3 = tl.load(own + 3 * width, mask=is_real, other=0.0).to(tl.float32)
        y = tl.load(out + token * width + at, mask=is_real, other=0.0).to(tl.float32)
        for i in tl.static_range(4):
            gate = res + token * 16 + i * 4
            mixed = tl.load(gate).to(tl.float32) * s0
            mixed += tl.load(gate + 1).to(tl.float32) * s1
            mixed += tl.load(gate + 2).to(tl.float32) * s2
            mixed += tl.load(gate + 3).to(tl.float32) * s3
            mixed += tl.load(post + token * 4 + i).to(tl.float32) * y
            tl.store(own + i * width, mixed.to(tl.bfloat16), mask=is_real)
