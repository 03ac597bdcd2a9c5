"""Hyper-connections of four streams on a CUDA device: reading the streams, writing them back.

Promises: as `kernels.mhc`; no fp32 copy of the streams, equal bits for equal inputs. The streams are read
once for the input of a half layer, and once, in place, for writing. The gates stay with their definition: a
fused kernel for them gave other bits in about one of ten runs at 57,344 tokens (docs/kernels.md).
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.mhc import Gates


def pre_mix(s_LSC: Tensor, pre_LS: Tensor, into_LC: Tensor) -> None:
    """Write the weighted sum of the streams of each token; as `kernels.mhc.pre_mix`, all dense and bf16."""
    length, _, width = s_LSC.shape
    _pre_mix[(length,)](s_LSC, pre_LS, into_LC, width, block=1024, num_warps=4)


def post_mix(s_LSC: Tensor, gate: Gates, out_LC: Tensor) -> None:
    """Mix the streams in place and add the half layer's output; as `kernels.mhc.post_mix`, dense and bf16."""
    length, _, width = s_LSC.shape
    _post_mix[(length,)](s_LSC, gate.res, gate.post, out_LC, width, block=1024, num_warps=4)


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
