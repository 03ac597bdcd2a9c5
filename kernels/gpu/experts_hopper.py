"""Routed experts on Hopper, one persistent kernel: gather, gate and up, SwiGLU7, down, weighted rows.

Promises: the roundings of `kernels.mh_moe` (fp32 accumulators, the hidden row rounded once, the weighted
result rounded once), no atomics, every route's row written exactly once. One warp streams the matrices by
bulk copies through a ring in shared memory; two groups of four warps each own 64 of a tile's 128 rows, so
that one activates while the other multiplies. Gate and up columns come to stand side by side in one slot of
the ring: one product for both, without another layout of the weights. It sorts nothing and sums nothing.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gpu.routing import Tiles
from kernels.mh_moe import ExpertWeights

# Width of a MoE head, rows of one warp group, columns of the inner width at a time, rows of a weight slot.
WIDTH = gl.constexpr(256)
ROWS = gl.constexpr(64)
INNER = gl.constexpr(64)
HALF = gl.constexpr(128)
# 32 KiB each; with 64 KiB of inputs that is all the shared memory of a multiprocessor.
STAGES = gl.constexpr(5)
SLOT_BYTES = gl.constexpr(32768)
_HALF_SLOT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _advance(slot, phase):
    is_last = slot == STAGES - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _activate(both_RF):
    """Return bf16 [rows, INNER] of fp32 gate columns followed by up columns."""
    gate, up = both_RF.reshape([ROWS, 2, INNER]).permute(0, 2, 1).split()
    gate = gl.minimum(gate, 7.0)
    up = gl.minimum(gl.maximum(up, -7.0), 7.0)
    # exp(-1.702 * gate) by the base-2 instruction; its reciprocal is exact to one unit in the last place.
    below = 1.0 + gl.exp2(-2.4554669595930157 * gate)
    sigmoid = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], dtype=gl.float32, is_pure=True, pack=1
    )
    return (gate * sigmoid * (up + 1.0)).to(gl.bfloat16)


@gluon.jit
def _load_weights(
    gate_desc, up_desc, down_desc, tile_expert, num_tiles_ptr, halves, downs, full, empty, width_inner
):
    """Keep the ring full: two slots of gate and up columns, then one of down rows, per inner block."""
    slot = 0
    phase = 1
    num_tiles = gl.load(num_tiles_ptr)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert = gl.load(tile_expert + tile)
        for first in range(0, width_inner, INNER):
            for part in gl.static_range(2):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), SLOT_BYTES)
                row = expert * WIDTH + part * HALF
                tma.async_copy_global_to_shared(
                    gate_desc, [row, first], full.index(slot), halves.index(2 * slot)
                )
                tma.async_copy_global_to_shared(
                    up_desc, [row, first], full.index(slot), halves.index(2 * slot + 1)
                )
                slot, phase = _advance(slot, phase)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), SLOT_BYTES)
            tma.async_copy_global_to_shared(
                down_desc, [expert * width_inner + first, 0], full.index(slot), downs.index(slot)
            )
            slot, phase = _advance(slot, phase)


@gluon.jit
def _multiply(
    x_ptr,
    order,
    weights,
    out,
    tile_expert,
    tile_start,
    tile_stop,
    num_tiles_ptr,
    stride_token,
    stride_head,
    num_experts,
    length,
    top_k,
    width_inner,
    x_smem,
    slots,
    downs,
    full,
    empty,
    group: gl.constexpr,
):
    """Run the 64 rows of this warp group for every tile of this program."""
    both_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    hidden_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows_of: gl.constexpr = gl.SliceLayout(1, row_layout)
    cols_of: gl.constexpr = gl.SliceLayout(0, row_layout)
    slot = 0
    phase = 0
    num_tiles = gl.load(num_tiles_ptr)
    cols = gl.arange(0, WIDTH, cols_of)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert = gl.load(tile_expert + tile)
        head = expert // num_experts
        places = gl.load(tile_start + tile) + group * ROWS + gl.arange(0, ROWS, rows_of)
        is_real = places < gl.load(tile_stop + tile)
        route = gl.load(order + places, mask=is_real, other=0)
        token = (route // top_k - head * length).to(gl.int64)
        sources = x_ptr + token * stride_token + head * stride_head
        x = gl.load(sources[:, None] + cols[None, :], mask=is_real[:, None], other=0.0)
        x_smem.store(x)
        fence_async_shared()
        gl.thread_barrier()
        acc = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout)
        no_both = gl.zeros([ROWS, 2 * INNER], gl.float32, both_layout)
        for _ in range(0, width_inner, INNER):
            mbarrier.wait(full.index(slot), phase)
            slot_b, phase_b = _advance(slot, phase)
            mbarrier.wait(full.index(slot_b), phase_b)
            both = warpgroup_mma(
                x_smem.slice(0, HALF, 1), slots.index(slot), no_both, use_acc=False, is_async=True
            )
            both = warpgroup_mma(x_smem.slice(HALF, HALF, 1), slots.index(slot_b), both, is_async=True)
            both_RF = warpgroup_mma_wait(0, deps=[both])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(slot))
            mbarrier.arrive(empty.index(slot_b))
            slot, phase = _advance(slot_b, phase_b)
            hidden = gl.convert_layout(_activate(both_RF), hidden_layout)
            mbarrier.wait(full.index(slot), phase)
            acc_t = warpgroup_mma(hidden, downs.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_t])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(slot))
            slot, phase = _advance(slot, phase)
        result = acc
        result_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
        own_places = gl.convert_layout(route, result_rows)
        scale = gl.load(weights + own_places)
        x_smem.store((result * scale[:, None]).to(gl.bfloat16))
        gl.thread_barrier()
        y = x_smem.load(row_layout)
        targets = out + route.to(gl.int64) * WIDTH
        gl.store(targets[:, None] + cols[None, :], y, mask=is_real[:, None])


@gluon.jit
def _experts(
    gate_desc,
    up_desc,
    down_desc,
    x_ptr,
    order,
    weights,
    out,
    tile_expert,
    tile_start,
    tile_stop,
    num_tiles_ptr,
    stride_token,
    stride_head,
    num_experts,
    length,
    top_k,
    width_inner,
    half_layout: gl.constexpr,
):
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    halves = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, HALF, INNER], half_layout)
    slots = halves._reinterpret(gl.bfloat16, [STAGES, HALF, 2 * INNER], half_layout)
    downs = halves._reinterpret(gl.bfloat16, [STAGES, INNER, WIDTH], half_layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, WIDTH], half_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
    fence_async_shared()
    gl.thread_barrier()
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_ptr,
                    order,
                    weights,
                    out,
                    tile_expert,
                    tile_start,
                    tile_stop,
                    num_tiles_ptr,
                    stride_token,
                    stride_head,
                    num_experts,
                    length,
                    top_k,
                    width_inner,
                    x_smem.index(0),
                    slots,
                    downs,
                    full,
                    empty,
                    zero,
                ),
            ),
            (
                _multiply,
                (
                    x_ptr,
                    order,
                    weights,
                    out,
                    tile_expert,
                    tile_start,
                    tile_stop,
                    num_tiles_ptr,
                    stride_token,
                    stride_head,
                    num_experts,
                    length,
                    top_k,
                    width_inner,
                    x_smem.index(1),
                    slots,
                    downs,
                    full,
                    empty,
                    one,
                ),
            ),
            (
                _load_weights,
                (
                    gate_desc,
                    up_desc,
                    down_desc,
                    tile_expert,
                    num_tiles_ptr,
                    halves,
                    downs,
                    full,
                    empty,
                    width_inner,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def run_tiles(
    x_LGD: Tensor, scales_GLK: Tensor, weights: ExpertWeights, tiles: Tiles, results: Tensor
) -> None:
    """Write the weighted row of every route, at its flat place (MoE head, token, slot)."""
    length, num_heads, _ = x_LGD.shape
    width_inner = weights.gate.shape[2]
    columns = [HALF.value, INNER.value]
    gate, up = (TensorDescriptor.from_tensor(w.flatten(0, 1), columns, _HALF_SLOT) for w in weights[:2])
    down = TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [INNER.value, WIDTH.value], _HALF_SLOT)
    programs = torch.cuda.get_device_properties(x_LGD.device).multi_processor_count
    _experts[(min(programs, tiles.bound),)](
        gate,
        up,
        down,
        x_LGD,
        tiles.order,
        scales_GLK,
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
        width_inner,
        half_layout=_HALF_SLOT,
        num_warps=4,
    )
