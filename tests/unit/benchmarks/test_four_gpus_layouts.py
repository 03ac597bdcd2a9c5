"""What the qualification compares by: weights that follow from names, pooled masters, each rank's part."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks.four_gpus import layouts, weights
from benchmarks.four_gpus.rank import Place, Rows
from benchmarks.four_gpus.world import Inputs, inputs_of, num_differing, relative_l2
from magi2.config import ModelConfig
from magi2.contract import TIERS, Tier
from magi2.offload.runtime import CudaRuntime
from magi2.parallel.groups import Group, Groups
from magi2.parallel.layout import Layout, rank_groups

TINY = ModelConfig.tiny()
CPU = torch.device("cpu")
EXPERTS = "block.layers.1.mlp.moe_mlp.W_up"


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Inputs:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 32, 32, 2))
    return inputs_of(Place("layout-sp4", 0, 1, "cpu", 0, True, 60.0, None, Rows(None)), TINY, "272p")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_weights_follow_from_their_names_alone() -> None:
    first, second = weights.RandomSource(TINY, CPU), weights.RandomSource(TINY, CPU)
    assert torch.equal(first(EXPERTS, whole), second(EXPERTS, whole))
    assert not torch.equal(first(EXPERTS, whole), first(EXPERTS.replace("1", "2"), whole))


def test_rank_keeps_its_own_part_of_a_drawn_tensor_only() -> None:
    source = weights.RandomSource(TINY, CPU)
    own = source(EXPERTS, lambda tensor: tensor[:8])
    assert torch.equal(own, source(EXPERTS, whole)[:8])
    assert own.untyped_storage().nbytes() == own.nbytes


def test_released_sizes_are_cut_to_two_layers_of_each_kind() -> None:
    released = ModelConfig.released()
    cut = weights.reduced(released)
    assert (cut.num_layers, cut.mm_layers, cut.moe.layers) == (4, (0, 3), (1, 2))
    assert cut == replace(
        released, num_layers=4, mm_layers=(0, 3), moe=replace(cut.moe, layers=cut.moe.layers)
    )
    assert replace(cut.moe, layers=released.moe.layers, routed_width=None) == released.moe
    assert weights.reduced(TINY) == TINY


def test_layers_of_a_kind_take_turns_in_pooled_masters() -> None:
    pool = weights.Pool(TINY, 2)  # dense 0 and 4; MoE 1, 2 and 3
    blocks = [pool.block(layer, 4096) for layer in range(5)]
    assert blocks[3].data_ptr() == blocks[1].data_ptr()
    assert len({block.data_ptr() for block in blocks}) == 4
    assert [pool.digest_of(layer) for layer in range(5)] == [None, None, None, 0, None]
    pool.fill_done(1, 77)
    assert (pool.digest_of(1), pool.digest_of(3), pool.digest_of(2)) == (77, 77, None)


def test_shared_masters_are_locked_once_and_unlocked_with_their_last_user() -> None:
    memory = torch.empty(16, dtype=torch.uint8)
    with (
        mock.patch.object(CudaRuntime, "__init__", return_value=None),
        mock.patch.object(CudaRuntime, "register", return_value=True) as register,
        mock.patch.object(CudaRuntime, "unregister") as unregister,
    ):
        runtime = weights.LockedOnce(torch.device("cuda:0"))
        assert runtime.register(memory)
        assert runtime.register(memory)
        runtime.unregister(memory)
        assert (register.call_count, unregister.call_count) == (1, 0)
        runtime.unregister(memory)
        assert unregister.call_count == 1


def groups_of(layout: Layout, rank: int) -> Groups:
    """The groups of a rank, without handles."""
    own = {
        axis: next(
            (Group(axis, ranks, ranks.index(rank)) for ranks in rank_groups(layout)[axis] if rank in ranks),
            Group(axis, (rank,)),
        )
        for axis in ("tp", "sp", "cfg", "ep")
    }
    return Groups(layout, rank, **own)


@pytest.mark.parametrize(
    ("layout", "own", "routed", "heads"),
    [
        (Layout(ulysses=4), ["0:10", "10:19", "19:28", "28:37"], ["0:37"] * 4, ["0:1", "1:2", "2:3", "3:4"]),
        (Layout(tp=4), ["0:37"] * 4, ["0:37"] * 4, ["0:1", "1:2", "2:3", "3:4"]),
        (
            Layout(tp=2, ulysses=2),
            ["0:19", "0:19", "19:37", "19:37"],
            ["0:19", "0:19", "19:37", "19:37"],
            ["0:2", "2:4", "0:2", "2:4"],
        ),
        (
            Layout(cfg_parallel=2, ulysses=2),
            ["0:11", "11:21", "21:29", "29:37"],
            ["0:21", "0:21", "21:37", "21:37"],
            ["0:2", "2:4", "0:2", "2:4"],
        ),
    ],
)
def test_each_rank_is_compared_by_its_own_rows_and_heads(
    layout: Layout, own: list[str], routed: list[str], heads: list[str]
) -> None:
    parts = [layouts.part_of(groups_of(layout, rank), TINY, (0, 21, 37)) for rank in range(4)]
    assert [spelled(part.own) for part in parts] == own
    assert [spelled(part.routed) for part in parts] == routed
    assert [spelled(part.heads) for part in parts] == heads


def spelled(rows: slice) -> str:
    return f"{rows.start}:{rows.stop}"


@torch.no_grad()
def test_one_wrong_tensor_is_seen_in_its_layer(inputs: Inputs) -> None:
    oracle, model = (weights.resident(TINY, CPU, Groups()) for _ in range(2))
    errors, moved = layouts.layer_errors(Groups(), oracle, model, inputs)
    assert (max(errors), moved) == (0.0, 0.0)
    projection = model.block.layers[3].attention.linear_proj.weight
    projection.copy_(projection.flip(1))
    errors, _ = layouts.layer_errors(Groups(), oracle, model, inputs)
    assert errors[:3] == [0.0] * 3
    assert errors[3] > layouts.NEAR
    got, want = inputs.predict(model), inputs.predict(oracle)
    assert num_differing(got, want) > 0
    assert relative_l2(got, want) > 0


@torch.no_grad()
def test_layer_is_compared_on_the_routes_that_one_rank_took(inputs: Inputs) -> None:
    oracle, model = (weights.resident(TINY, CPU, Groups()) for _ in range(2))
    for layer in model.block.layers[1:4]:
        layer.mlp.moe_mlp.router.expert_bias.neg_()  # it would choose otherwise
    errors, moved = layouts.layer_errors(Groups(), oracle, model, inputs)
    assert max(errors) == 0.0
    assert moved > 0
