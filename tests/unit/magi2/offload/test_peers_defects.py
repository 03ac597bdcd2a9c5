"""Defects seen in other engines of this model that are not a matter of one module here.

Numbers are those of the list that all tests named `test_defect_NN` follow: 1 and 3 are in test_ring.py, 2 in
test_gathered_ring.py, 4 in test_flats.py, 5 in checkpoint/test_load_streamed.py, 6 and 7 in the multiprocess
tier, 8 with the worker's board, 9 in test_wave.py, 13 in test_masters.py.
"""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.mh_moe import ExpertWeights, Routes, routed_experts
from magi2 import packing
from magi2.model.moe import MoE
from magi2.parallel.groups import Group, Groups
from magi2.parallel.layout import Layout
from magi2.parallel.tensor import cut_of
from magi2.record import RunRecord, silent
from tests.unit.magi2.model.tiny import conditioning, latents, random_model, small_config
from tests.unit.magi2.offload.toys import make


class NoHostReads(TorchDispatchMode):
    """Refuses to bring a value of a tensor to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a tensor's value was read on the host")
        return func(*args, **(kwargs or {}))


def test_defect_10_padded_moe_heads_copy_and_hold_nothing() -> None:
    config = small_config()  # three MoE heads, of which rank 3 of 4 has none
    name, rows = "block.layers.1.mlp.moe_mlp.W_up", config.moe.num_heads * config.moe.num_experts
    stored = torch.randn(rows, 2, 3)
    for rank in range(4):
        ep = Group("ep", (0, 1, 2, 3), rank)
        cut = cut_of(name, tuple(stored.shape), config, Groups(Layout(ulysses=4), rank, ep=ep))
        own = cut.of(stored)
        assert own.shape[0] == (config.moe.num_experts if rank < 3 else 0)
        assert own.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


def test_defect_11_tokens_far_apart_in_memory_are_found() -> None:
    """Rows 2^30 values apart: the third one's place does not fit 31 bits."""
    distance, width = 2**30, 16
    memory = torch.empty(2 * distance + width, dtype=torch.bfloat16)  # never touched but at the rows
    far = memory.as_strided((3, 1, width), (distance, width, 1))
    near = torch.randn(3, 1, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    far.copy_(near)
    experts = torch.randn(4, width, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    weights = ExpertWeights(experts, experts.flip(0), experts.transpose(1, 2).contiguous())
    routes = Routes(torch.tensor([[[0, 1], [2, 3], [3, 0]]]), torch.ones(1, 3, 2))
    assert torch.equal(routed_experts(far, routes, weights), routed_experts(near, routes, weights))


def test_defect_12_and_14_no_layer_reads_sizes_or_splits_from_the_device() -> None:
    model = random_model(small_config())
    batch = packing.pack(*latents(), conditioning(num_images=1))
    tokens = model.prepare(batch).tokens
    streams = torch.randn(tokens.num_tokens, 3, 48)
    with torch.no_grad(), NoHostReads():
        for layer in model.block.layers:
            reading = layer.begin(streams, tokens)
            if isinstance(layer.mlp, MoE):
                # The experts between are a kernel, whose torch definition alone reads on the host.
                sent = layer.mlp.begin(reading.x, tokens)
                out = layer.mlp.finish(sent.out, sent.heads, tokens)
            else:
                out = layer.mlp(reading.x, tokens)
            layer.end(streams, reading, out, tokens)


def test_defect_12_a_ring_reads_nothing_from_the_device() -> None:
    toy = make()
    toy.runtime.can_inspect = False  # as on a device, where stamps are not looked at
    with NoHostReads():
        for place in range(toy.ring.size):
            toy.ring.run(place, lambda: None)
        toy.runtime.settle()


def test_defect_15_peak_memory_is_the_largest_and_stands_for_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Four(Group):
        def stack(self, x: Tensor) -> Tensor:
            return torch.stack([x, x * 3, x * 2, x])

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", mock.Mock())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 100 * 2**20)
    record = RunRecord(torch.device("cuda", 0), silent, lambda: False)
    stats = record.stats(Four("replica", (0, 1, 2, 3)))
    assert stats.peak_memory_mb == 300
    assert stats.rank_peak_memory_mb == [100, 300, 200, 100]
