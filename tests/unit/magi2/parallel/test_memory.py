"""The memory calculator against the released sizes, and what it refuses."""

from math import prod

import pytest

from magi2.checkpoint.keys import expected_tensors
from magi2.config import ModelConfig
from magi2.errors import LayoutError
from magi2.parallel.layout import Layout
from magi2.parallel.memory import (
    BY_HEAD,
    GIB,
    block_bytes,
    check_memory,
    layer_bytes,
    piece_bytes,
    plan,
    rank_bytes,
    released_plan,
    resident_layers,
)
from tests.unit.magi2.model.tiny import small_config

MIB = 2**20
RELEASED = ModelConfig.released()


def test_released_model_has_the_published_size_to_the_byte() -> None:
    assert rank_bytes(RELEASED, Layout()) == 228_107_858_176
    assert layer_bytes(RELEASED, 0).total == 682_503_480
    assert layer_bytes(RELEASED, 2).total == 6_253_192_504


@pytest.mark.parametrize(
    ("layout", "dense_mib", "moe_mib", "blocks_gib"),
    [
        (Layout(), 650.9, 5963.5, 212.20),
        (Layout(ulysses=2), 650.9, 3082.0, 110.89),
        (Layout(ulysses=4), 650.9, 1641.2, 60.24),
        (Layout(ulysses=8), 650.9, 1161.0, 43.36),
    ],
)
def test_blocks_shrink_with_the_expert_group(
    layout: Layout, dense_mib: float, moe_mib: float, blocks_gib: float
) -> None:
    assert block_bytes(RELEASED, layout, 0) / MIB == pytest.approx(dense_mib, abs=0.05)
    assert block_bytes(RELEASED, layout, 2) / MIB == pytest.approx(moe_mib, abs=0.06)
    total = sum(block_bytes(RELEASED, layout, layer) for layer in range(40))
    assert total / GIB == pytest.approx(blocks_gib, abs=0.006)


def test_ranks_without_a_real_head_hold_only_what_is_replicated() -> None:
    own = block_bytes(RELEASED, Layout(ulysses=8), 2, rank=7)
    assert own / MIB == pytest.approx(200.5, abs=0.05)


# Weights and buffers on a device, pinned on the host for a rank and for a node, all GiB.
PINNED = {
    "resident SP4": (Layout(ulysses=4), 60.49, 0, 0, 53),
    "resident TP4": (Layout(tp=4), 53.36, 0, 0, 53),
    "resident TP2SP2": (Layout(tp=2, ulysses=2), 106.39, 0, 0, 53),
    "resident CFG2SP2": (Layout(cfg_parallel=2, ulysses=2), 111.14, 0, 0, 53),
    "resident SP8": (Layout(ulysses=8), 43.60, 0, 0, 53),
    "resident SP8 EP4": (Layout(ulysses=8, ep=4), 60.49, 0, 0, 53),
    "HSDP4+SP4": (Layout(ulysses=4, hsdp=True), 53.11, 1.27, 0, 53),
    "HSDP4+CFG2SP2": (Layout(ulysses=2, cfg_parallel=2, hsdp=True), 103.76, 1.27, 0, 53),
    "DLO DP4": (Layout(data_parallel=4, dlo=True), 0.24, 14.56, 53.05, 424.2),
    "DLO DP2SP2": (Layout(data_parallel=2, ulysses=2, dlo=True), 0.24, 9.03, 55.45, 327.8),
    "DLO SP4": (Layout(ulysses=4, dlo=True, dlo_no_allgather=True), 0.24, 3.21, 60.24, 294.0),
    "layerwise": (Layout(layerwise=True), 0.24, 11.65, 212.20, 265.2),
}


@pytest.mark.parametrize(
    ("layout", "weights", "buffers", "pinned", "node"), PINNED.values(), ids=PINNED.keys()
)
def test_plan_has_the_pinned_numbers(
    layout: Layout, weights: float, buffers: float, pinned: float, node: float
) -> None:
    needed = plan(RELEASED, layout)
    found = (needed.weights, needed.buffers, needed.pinned)
    assert [value / GIB for value in found] == pytest.approx([weights, buffers, pinned], abs=0.006)
    assert needed.pinned_node / GIB == pytest.approx(node, abs=0.06)


def test_slots_of_moe_heads_take_an_eighth_of_those_of_layers() -> None:
    needed = plan(RELEASED, Layout(layerwise=True), stream_by=BY_HEAD)
    assert piece_bytes(RELEASED, Layout()) / MIB == pytest.approx(480, abs=3)
    assert needed.buffers / GIB == pytest.approx(0.94, abs=0.01)
    assert needed.pinned == plan(RELEASED, Layout(layerwise=True)).pinned


def test_resident_layers_are_spread_over_the_ring() -> None:
    assert sorted(resident_layers(40, 4)) == [5, 15, 25, 35]
    assert sorted(resident_layers(5, 2)) == [1, 3]
    assert resident_layers(5, 0) == frozenset()
    assert len(resident_layers(40, 39 - 1)) == 38
    assert resident_layers(4, 9) == resident_layers(4, 4) == frozenset(range(4))
    with pytest.raises(LayoutError, match=r"--resident-blocks 39 of 40 leaves one block .* give 38 or 40"):
        resident_layers(40, 39)


def test_resident_layers_leave_the_host_and_come_to_the_device() -> None:
    none, some = (plan(RELEASED, Layout(layerwise=True, resident_blocks=count)) for count in (0, 16))
    assert none.pinned - some.pinned == some.weights - none.weights > 80 * GIB


@pytest.mark.parametrize(
    ("layout", "gib"), [(Layout(), 40), (Layout(ulysses=2), 20), (Layout(ulysses=4), 10)]
)
def test_activations_shrink_with_the_sequence(layout: Layout, gib: float) -> None:
    large = plan(RELEASED, layout).activations
    assert large / GIB == pytest.approx(gib, abs=0.1)
    assert plan(RELEASED, layout, tier="272p").activations / large == pytest.approx(0.26, abs=0.01)


@pytest.mark.parametrize("model", [ModelConfig.tiny(), small_config(), small_config(params_dtype="bfloat16")])
def test_calculated_bytes_are_those_of_the_modules(model: ModelConfig) -> None:
    wanted = [need.dtype.itemsize * prod(need.shape) for need in expected_tensors(model).values()]
    assert rank_bytes(model, Layout()) == sum(wanted)


def test_what_does_not_fit_is_refused_with_the_table() -> None:
    layout = Layout(ulysses=4)
    needed = plan(RELEASED, layout)
    check_memory(needed, layout, device_bytes=139 * GIB, host_bytes=500 * GIB)
    with pytest.raises(
        LayoutError, match=r"--ulysses 4 does not fit: 110.5 GiB of device memory needed, 80.0 GiB.*60.49"
    ):
        check_memory(needed, layout, device_bytes=80 * GIB, host_bytes=500 * GIB)
    with pytest.raises(LayoutError, match=r"53.0 GiB of host memory needed, 40.0 GiB there"):
        check_memory(needed, layout, device_bytes=139 * GIB, host_bytes=40 * GIB)


def test_cached_steps_keep_four_states_of_the_streams() -> None:
    plain, caching = (released_plan(Layout(ulysses=4, cache_dit=on)) for on in (False, True))
    tokens = 29_184
    assert caching.activations - plain.activations == pytest.approx(tokens * 12_288 * 2 * 4, rel=0.01)
    assert caching.weights == plain.weights


def test_released_plan_fits_a_device_as_the_engine_would() -> None:
    layerwise = Layout(layerwise=True)
    roomy, small = (released_plan(layerwise, tier="272p", device_bytes=size * GIB) for size in (141, 20))
    assert roomy.buffers > 11 * GIB > 2 * GIB > small.buffers
    assert released_plan(layerwise).staged == 50 * GIB
