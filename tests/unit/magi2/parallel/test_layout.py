"""The rank and group table, and every refusal of a layout with its words."""

from dataclasses import replace
from itertools import product

import pytest

from magi2.config import ModelConfig
from magi2.errors import LayoutError
from magi2.parallel.layout import (
    UNSUPPORTED,
    Layout,
    check,
    coordinates,
    head_counts,
    rank_groups,
    span,
    split_lengths,
)

# The printed table: layout, then the groups of more than one rank on each axis.
PRINTED = {
    "TP4": (Layout(tp=4), {"tp": "0123"}),
    "TP2SP2": (Layout(tp=2, ulysses=2), {"tp": "01 23", "sp": "02 13"}),
    "SP4": (Layout(ulysses=4), {"sp": "0123"}),
    "SP8": (Layout(ulysses=8), {"sp": "01234567"}),
    "DP4": (Layout(data_parallel=4, dlo=True), {"dp": "0123"}),
    "DP2SP2": (Layout(data_parallel=2, ulysses=2, dlo=True), {"sp": "01 23", "dp": "02 13"}),
    "DP2SP4": (Layout(data_parallel=2, ulysses=4, dlo=True), {"sp": "0123 4567", "dp": "04 15 26 37"}),
    "CFG2SP2": (Layout(cfg_parallel=2, ulysses=2), {"sp": "01 23", "cfg": "02 13"}),
    "CFG2SP4": (Layout(cfg_parallel=2, ulysses=4), {"sp": "0123 4567", "cfg": "04 15 26 37"}),
    "TP2SP4": (Layout(tp=2, ulysses=4), {"tp": "01 23 45 67", "sp": "0246 1357"}),
    "TP4SP2": (Layout(tp=4, ulysses=2), {"tp": "0123 4567", "sp": "04 15 26 37"}),
}


def groups_of(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group)) for group in text.split())


@pytest.mark.parametrize(
    ("layout", "printed"), PRINTED.values(), ids=[f"rank and group table: {row}" for row in PRINTED]
)
def test_groups_are_those_of_the_printed_table(layout: Layout, printed: dict[str, str]) -> None:
    found = rank_groups(layout)
    for axis in ("tp", "sp", "cfg", "dp"):
        alone = tuple((rank,) for rank in range(layout.world))
        assert found[axis] == (groups_of(printed[axis]) if axis in printed else alone), axis


def layouts_up_to(world: int) -> list[Layout]:
    found = []
    for tp, ulysses, cfg, dp in product((1, 2, 4), range(1, 9), (1, 2), (1, 2, 3, 4)):
        if tp * ulysses * cfg * dp <= world:
            try:
                found.append(Layout(tp, ulysses, cfg, dp, dlo=dp > 1))
            except LayoutError:
                continue
    return found


def test_each_axis_covers_every_rank_once_in_worlds_up_to_16() -> None:
    layouts = layouts_up_to(16)
    assert {layout.world for layout in layouts} == {*range(1, 17)} - {11, 13}
    for layout in layouts:
        for axis, found in rank_groups(layout).items():
            ranks = sorted(rank for group in found for rank in group)
            assert ranks == list(range(layout.world)) or (axis == "weights" and not layout.is_gathered)
            assert all(list(group) == sorted(group) for group in found)


def test_ranks_count_tensor_parallel_fastest_and_data_parallel_slowest() -> None:
    for layout in layouts_up_to(16):
        for rank in range(layout.world):
            tp, sp, cfg, dp = coordinates(layout, rank)
            assert rank == tp + layout.tp * (sp + layout.ulysses * (cfg + layout.cfg_parallel * dp))


def test_replica_holds_both_branches_and_no_other_replica() -> None:
    assert rank_groups(Layout(cfg_parallel=2, ulysses=2))["replica"] == ((0, 1, 2, 3),)
    assert rank_groups(Layout(data_parallel=2, ulysses=2, dlo=True))["replica"] == ((0, 1), (2, 3))


def test_weights_group_is_the_replicas_and_only_where_blocks_are_gathered() -> None:
    assert rank_groups(Layout(data_parallel=2, ulysses=2, dlo=True))["weights"] == ((0, 2), (1, 3))
    assert rank_groups(Layout(ulysses=4, dlo=True, dlo_no_allgather=True))["weights"] == ()


def test_expert_groups_lie_inside_the_sequence_group() -> None:
    assert rank_groups(Layout(ulysses=8, ep=4))["ep"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert rank_groups(Layout(ulysses=4, ep=1))["ep"] == ((0,), (1,), (2,), (3,))
    assert rank_groups(Layout(tp=2, ulysses=2))["ep"] == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("total", "parts", "lengths"), [(37, 4, (10, 9, 9, 9)), (37, 2, (19, 18)), (3, 4, (1, 1, 1, 0))]
)
def test_first_ranks_get_the_longer_slices(total: int, parts: int, lengths: tuple[int, ...]) -> None:
    assert split_lengths(total, parts) == lengths
    assert [span(lengths, part) for part in range(parts)][-1][1] == total


@pytest.mark.parametrize(
    ("heads", "ranks", "counts"),
    [
        (12, 4, (3, 3, 3, 3)),
        (12, 8, (2, 2, 2, 2, 2, 2, 0, 0)),
        (3, 2, (2, 1)),
        (3, 4, (1, 1, 1, 0)),
        (12, 12, (1,) * 12),
    ],
)
def test_padded_heads_are_never_stored(heads: int, ranks: int, counts: tuple[int, ...]) -> None:
    assert head_counts(heads, ranks) == counts


REFUSALS = {
    "cfg-3": ({"cfg_parallel": 3}, r"--cfg-parallel must be one of 1, 2 \(got 3\): there are two branches"),
    "ulysses-0": ({"ulysses": 0}, r"--ulysses must be one of 1, .*8 \(got 0\)"),
    "ulysses-text": ({"ulysses": "4"}, r"--ulysses must be one of .* \(got 4\)"),
    "data-5": ({"data_parallel": 5, "dlo": True}, r"--data-parallel must be one of 1, 2, 3, 4 \(got 5\)"),
    "ep-with-tp": ({"tp": 4, "ep": 2}, r"--ep 2 with --tp 4: the MoE-head owner is ambiguous.*set it to 4"),
    "ep-no-divisor": (
        {"ulysses": 4, "ep": 3},
        (
            r"--ep 3 does not divide --ulysses 4: the MoE-head "
            "owner is ambig"
        ),
    ),
    "ep-0": ({"ulysses": 4, "ep": 0}, r"--ep must be a positive number \(got 0\)"),
    "cfg-with-data": (
        {"cfg_parallel": 2, "data_parallel": 2, "dlo": True},
        r"--cfg-parallel 2 with --data-parallel above 1 is not yet combined",
    ),
    "data-without-dlo": (
        {"data_parallel": 4},
        (
            r"--data-parallel above 1 needs --dlo.*run separate "
            "engines instead"
        ),
    ),
    "data-rank-local": (
        {"data_parallel": 4, "dlo": True, "dlo_no_allgather": True},
        r"--data-parallel above 1 needs --dlo without --dlo-no-allgather",
    ),
    "data-with-tp": (
        {"data_parallel": 2, "tp": 2, "dlo": True},
        r"--data-parallel above 1 with --tp above 1: a replica is one sequence-parallel group",
    ),
    "gather-one-replica": ({"ulysses": 4, "dlo": True}, r"--dlo gathers shares.*add --dlo-no-allgather"),
    "gather-with-tp": ({"tp": 4, "dlo": True}, r"--dlo with --tp above 1 cannot gather.*--dlo-no-allgather"),
    "gather-with-cache": (
        {"data_parallel": 4, "dlo": True, "cache_dit": True},
        r"--cache-dit with gathered --dlo: ranks may skip different collectives",
    ),
    "hsdp-with-tp": ({"hsdp": True, "tp": 4}, r"--hsdp with --tp, .* gives a tensor two owners"),
    "hsdp-with-data": ({"hsdp": True, "data_parallel": 4, "dlo": True}, r"--hsdp with --tp, --data-parallel"),
    "hsdp-with-dlo": (
        {"hsdp": True, "ulysses": 4, "dlo": True, "dlo_no_allgather": True},
        r"--hsdp with --tp, --data-parallel, --dlo",
    ),
    "hsdp-with-layerwise": ({"hsdp": True, "layerwise": True}, r"--hsdp with --tp, .* or --layerwise"),
    "hsdp-alone": ({"hsdp": True}, r"--hsdp on one rank has nothing to shard over"),
    "layerwise-world": ({"layerwise": True, "ulysses": 4}, r"--layerwise is the path of a single rank"),
    "layerwise-dlo": (
        {"layerwise": True, "dlo": True, "dlo_no_allgather": True},
        r"--layerwise is the path of a single rank: on several use --dlo",
    ),
    "cpu-offload": ({"cpu_offload": True}, r"--cpu-offload without --layerwise: .*add --layerwise"),
    "vae-with-replicas": (
        {"data_parallel": 2, "dlo": True, "vae_patch_parallel": 2},
        r"--vae-patch-parallel with --data-parallel above 1: replicas decode different clips",
    ),
    "vae-2-of-4": ({"ulysses": 4, "vae_patch_parallel": 2}, r"--vae-patch-parallel 2: .*set it to 1 or 4"),
    "resident-gathered": (
        {"data_parallel": 4, "dlo": True, "resident_blocks": 3},
        r"--resident-blocks with gathered --dlo: resident blocks are rank-local",
    ),
    "resident-unstreamed": ({"resident_blocks": "auto"}, r"--resident-blocks without --dlo or --layerwise"),
    "resident-text": (
        {"layerwise": True, "resident_blocks": "all"},
        (
            r"--resident-blocks must be a "
            "count or auto"
        ),
    ),
    "no-allgather-alone": ({"dlo_no_allgather": True}, r"--dlo-no-allgather without --dlo means nothing"),
    "stranger": ({"ulises": 4}, r"--ulises is not a flag of a layout"),
} | {name: ({name: 2}, rf"--{name.replace('_', '-')}: .*leave it out") for name in UNSUPPORTED}


@pytest.mark.parametrize(
    ("flags", "words"), REFUSALS.values(), ids=[f"refusal table: {row}" for row in REFUSALS]
)
def test_refusal_names_value_rule_and_flag(flags: dict[str, object], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.from_flags(flags)


MODEL_REFUSALS = {
    "heads": (Layout(ulysses=5), r"24 attention heads do not divide by --tp 1 x --ulysses 5 = 5"),
    "heads-both": (Layout(tp=4, ulysses=4), r"24 attention heads do not divide by --tp 4 x --ulysses 4 = 16"),
    "TP8 refused": (Layout(tp=8), r"12 MoE heads do not divide by --tp 8; choose a divisor of 12"),
    "tp3": (
        Layout(tp=3),
        (
            r"dense intermediate width 8192 does not divide by --tp 3: .* a gate from "
            "its linear"
        ),
    ),
}


@pytest.mark.parametrize(("layout", "words"), MODEL_REFUSALS.values(), ids=MODEL_REFUSALS.keys())
def test_model_that_does_not_divide_is_refused(layout: Layout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check(layout, ModelConfig.released())


def test_odd_cut_through_pairs_is_refused_though_the_doubled_width_divides() -> None:
    tiny = ModelConfig.tiny()
    odd = replace(tiny, moe=replace(tiny.moe, shared_width=33))
    with pytest.raises(LayoutError, match="shared expert width 33 does not divide by --tp 2"):
        check(Layout(tp=2), odd)


def test_few_key_heads_may_be_repeated_but_not_parted() -> None:
    grouped = replace(ModelConfig.tiny(), num_query_groups=2)
    check(Layout(ulysses=4), grouped)
    check(Layout(tp=2, ulysses=2), grouped)
    with pytest.raises(LayoutError, match="2 key heads do not divide by --tp 4"):
        check(Layout(tp=4), grouped)


def test_launch_of_another_size_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"3 ranks were launched, but --tp 1 x --ulysses 4 .* needs 4.*launch 4"
    ):
        check(Layout(ulysses=4), ModelConfig.released(), launched=3)


def test_all_broken_rules_come_at_once() -> None:
    with pytest.raises(LayoutError, match=r"--hsdp with .*--layerwise is the path"):
        Layout(hsdp=True, layerwise=True, ulysses=4)


@pytest.mark.parametrize("name", PRINTED)
def test_usual_layouts_fit_the_released_model_and_the_tiny_one(name: str) -> None:
    layout, _ = PRINTED[name]
    check(layout, ModelConfig.released(), launched=layout.world)
    if layout.tp * layout.ulysses <= 4:
        check(layout, ModelConfig.tiny())


def test_only_unqualified_worlds_are_warned_of() -> None:
    assert [Layout(ulysses=n).warning is None for n in (1, 2, 3, 4, 8)] == [True, False, False, True, True]
    assert Layout(ulysses=6).warning == "layout --ulysses 6 is unqualified: 6 ranks, qualified are 1, 4, 8"


def test_layout_spells_its_flags() -> None:
    assert str(Layout()) == "one rank"
    assert (
        str(Layout(ulysses=4, hsdp=True, vae_patch_parallel=4)) == "--ulysses 4 --hsdp --vae-patch-parallel 4"
    )
