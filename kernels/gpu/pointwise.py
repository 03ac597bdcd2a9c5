"""Per-token operations on a CUDA device, one pass each: norms, rotary position, SwiGLU7, sink correction.

Promises: fp32 inside and one rounding to bf16, where the definitions leave the rounding to the caller.
Definitions: `kernels.rms_norm`, `kernels.qk_norm_rope`, `kernels.swiglu7` and
`kernels.attention.sink_correction`. It takes bf16 whose last dim is dense.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rms_norm import EPS


def rms_norm(x_LC: Tensor, weight_C: Tensor) -> Tensor:
    """Normalize rows; bf16 in and out."""
    out = torch.empty(x_LC.shape, dtype=torch.bfloat16, device=x_LC.device)
    width = x_LC.shape[1]
    block = triton.next_power_of_2(width)
    _norm[(x_LC.shape[0],)](x_LC, weight_C, out, x_LC.stride(0), width, EPS, block=block, num_warps=4)
    return out


def norm_rope(x_LHD: Tensor, weight_D: Tensor, table_LR: Tensor, into_LHD: Tensor) -> None:
    """Normalize and rotate every head into `into_LHD`."""
    length, heads, width = x_LHD.shape
    block_heads = 8
    _norm_rope[(length, triton.cdiv(heads, block_heads))](
        x_LHD,
        weight_D,
        table_LR,
        into_LHD,
        x_LHD.stride(0),
        x_LHD.stride(1),
        into_LHD.stride(0),
        into_LHD.stride(1),
        table_LR.stride(0),
        heads,
        table_LR.shape[1] // 2,
        EPS,
        width=width,
        block_heads=block_heads,
        num_warps=2,
    )


def swiglu7(x: Tensor) -> Tensor:
    """Activate dense [..., 2F], gate and linear part interleaved, to [..., F]."""
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.bfloat16, device=x.device)
    total = out.numel()
    _swiglu7[(triton.cdiv(total, 2048),)](x, out, total, block=2048, num_warps=4)
    return out


def sink_correction(plain_LHD: Tensor, lse_LH: Tensor, sinks: Tensor, into_LHD: Tensor) -> None:
    """Write the output of a plain softmax as it is with sinks; `into_LHD` may be the input."""
    length, heads, width = plain_LHD.shape
    block_heads = 8
    _sink[(length, triton.cdiv(heads, block_heads))](
        plain_LHD,
        lse_LH,
        torch.logsumexp(sinks.float(), dim=0),
        into_LHD,
        plain_LHD.stride(0),
        plain_LHD.stride(1),
        lse_LH.stride(0),
        lse_LH.stride(1),
        into_LHD.stride(0),
        into_LHD.stride(1),
        heads,
        width=width,
        block_heads=block_heads,
        num_warps=4,
    )


@triton.jit
def _norm(x_ptr, weight, out, stride, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block)
    is_real = cols < width
    x = tl.load(x_ptr + row * stride + cols, mask=is_real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    y = x * scale * (1.0 + tl.load(weight + cols, mask=is_real, other=0.0))
    tl.store(out + row * width + cols, y.to(tl.bfloat16), mask=is_real)


@triton.jit
def _norm_rope(
    x_ptr,
    weight,
    table,
    into,
    stride_token,
    stride_head,
    into_token,
    into_head,
    stride_table,
    heads,
    pairs,
    eps,
    width: tl.constexpr,
    block_heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    is_real = head < heads
    d = tl.arange(0, width)
    # Channel d turns with its partner; those behind the pairs keep still.
    is_first, is_turning = d < pairs, d < 2 * pairs
    partner = tl.where(is_first, d + pairs, tl.where(is_turning, d - pairs, d))
    angle = table + token * stride_table + tl.where(is_first, d, d - pairs)
    sin = tl.load(angle, mask=is_turning, other=0.0)
    cos = tl.load(angle + pairs, mask=is_turning, other=1.0)
    sin = tl.where(is_first, -sin, sin)
    own = x_ptr + token * stride_token + head * stride_head
    x = tl.load(own + d[None, :], mask=is_real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    other = tl.load(own + partner[None, :], mask=is_real, other=0.0).to(tl.float32)
    x = x * scale * (1.0 + tl.load(weight + d))[None, :]
    other = other * scale * (1.0 + tl.load(weight + partner))[None, :]
    y = x * cos[None, :] + other * sin[None, :]
    tl.store(into + token * into_token + head * into_head + d[None, :], y.to(tl.bfloat16), mask=is_real)


@triton.jit
def _swiglu7(x_ptr, out, total, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * block
    both = tl.arange(0, 2 * block)
    pair = tl.load(x_ptr + 2 * first + both, mask=first + both // 2 < total, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pair, [block, 2]))
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    y = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    at = first + tl.arange(0, block)
    tl.store(out + at, y.to(tl.bfloat16), mask=at < total)


@triton.jit
def _sink(
    plain,
    lse,
    sink,
    into,
    stride_token,
    stride_head,
    lse_token,
    lse_head,
    into_token,
    into_head,
    heads,
    width: tl.constexpr,
    block_heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads)).to(tl.int64)
    is_real = head < heads
    d = tl.arange(0, width)[None, :]
    own_lse = tl.load(lse + token * lse_token + head * lse_head, mask=is_real, other=0.0).to(tl.float32)
    factor = tl.sigmoid(own_lse - tl.load(sink + head, mask=is_real, other=0.0))
    source = plain + token * stride_token + head[:, None] * stride_head + d
    value = tl.load(source, mask=is_real[:, None], other=0.0).to(tl.float32) * factor[:, None]
    target = into + token * into_token + head[:, None] * into_head + d
    tl.store(target, value.to(tl.bfloat16), mask=is_real[:, None])
