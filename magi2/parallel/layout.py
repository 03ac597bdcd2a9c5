"""The shape of an engine over many ranks: its degrees, who is in which group, and what cannot work.

Promises: a `Layout` that exists obeys every rule that needs no model; `check` adds those of the model and of
the launch, before any weight is read. All broken rules come in one `LayoutError`, and each names the value,
the rule and the flag to change. Pure functions of plain integers, so every rank comes to the same answer.
Torch-free; it opens no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

from magi2.config import ModelConfig
from magi2.errors import LayoutError

# The farm takes its error from here, with the layout.
__all__ = [
    "Coordinates",
    "Layout",
    "LayoutError",
    "check",
    "check_released",
    "coordinates",
    "head_counts",
    "rank_groups",
    "span",
    "split_lengths",
]

QUALIFIED_WORLDS = (1, 4, 8)
AUTO = "auto"
# Flags of other engines; whoever asks for them is told, not ignored.
UNSUPPORTED = {
    "pipeline_parallel": "layers are not cut into stages: use --ulysses or --tp",
    "ring": "attention is spread by heads: use --ulysses",
    "allgather_kv": "keys and values travel with the queries, by heads",
    "text_encoder_tp": "the text encoder runs on the output rank alone",
    "expert_parallel": "experts are owned by MoE head: use --ep",
    "quantization": "the released weights are bfloat16, and no other equations are known",
}
_DEGREES = {
    "tp": (1, 2, 4),
    "ulysses": tuple(range(1, 9)),
    "cfg_parallel": (1, 2),
    "data_parallel": (1, 2, 3, 4),
}


@dataclass(frozen=True)
class Layout:
    """Degrees and switches, named as the flags are, with underscores.

    Args:
        tp: Ranks among which matrices are cut.
        ulysses: Ranks among which the tokens of a sequence are cut.
        cfg_parallel: 2 gives each branch its own ranks.
        data_parallel: Replicas that share streamed weights.
        ep: Ranks among which MoE heads are cut; None means `tp` where that is above 1, else `ulysses`.
        hsdp: Shard what is not an expert over all ranks.
        vae_patch_parallel: Ranks that decode video windows: 1 or all.
        layerwise: One device; blocks are streamed from the host.
        cpu_offload: Only together with `layerwise`.
        dlo: Blocks are streamed on every rank; shares are gathered over replicas unless told otherwise.
        dlo_no_allgather: Each rank streams its own blocks.
        resident_blocks: Blocks that stay on the device, or "auto".
        cache_dit: Skip layers whose input barely changed.

    Raises:
        LayoutError: Every rule that is broken, in one message.
    """

    tp: int = 1
    ulysses: int = 1
    cfg_parallel: int = 1
    data_parallel: int = 1
    ep: int | None = None
    hsdp: bool = False
    vae_patch_parallel: int = 1
    layerwise: bool = False
    cpu_offload: bool = False
    dlo: bool = False
    dlo_no_allgather: bool = False
    resident_blocks: int | str = 0
    cache_dit: bool = False

    def __post_init__(self) -> None:
        _raise_if(_degree_problems(self) or [text for is_broken, text in _RULES if is_broken(self)])

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Layout:
        """Build a layout from flags or a profile's row; None means not given.

        Raises:
            LayoutError: A flag is not one of this engine's, or a rule is broken.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        _raise_if(
            [
                f"--{_dashed(name)}: {why}; leave it out"
                for name, why in UNSUPPORTED.items()
                if given.get(name)
            ]
        )
        names = {field.name for field in fields(cls)}
        strangers = sorted(set(given) - names - set(UNSUPPORTED))
        _raise_if([f"--{_dashed(name)} is not a flag of a layout" for name in strangers])
        return cls(**{name: value for name, value in given.items() if name in names})

    @property
    def world(self) -> int:
        """Ranks of the whole engine."""
        return self.tp * self.ulysses * self.cfg_parallel * self.data_parallel

    @property
    def replica_size(self) -> int:
        """Ranks that render one request."""
        return self.world // self.data_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the MoE heads are cut."""
        if self.ep is not None:
            return self.ep
        return self.tp if self.tp > 1 else self.ulysses

    @property
    def is_gathered(self) -> bool:
        """Whether streamed blocks are gathered from the replicas' shares."""
        return self.dlo and not self.dlo_no_allgather

    @property
    def is_streamed(self) -> bool:
        """Whether blocks come from the host."""
        return self.dlo or self.layerwise

    @property
    def warning(self) -> str | None:
        """What to print before a layout runs that nobody has qualified."""
        if self.world in QUALIFIED_WORLDS:
            return None
        worlds = ", ".join(map(str, QUALIFIED_WORLDS))
        return f"layout {self} is unqualified: {self.world} ranks, qualified are {worlds}"

    def __str__(self) -> str:
        """Spell the flags that are not at their defaults."""
        named = {name: value for name, value in asdict(self).items() if value != getattr(Layout, name)}
        spelled = [f"--{_dashed(n)}" if v is True else f"--{_dashed(n)} {v}" for n, v in named.items()]
        return " ".join(spelled) or "one rank"


class Coordinates(NamedTuple):
    """Where a rank stands on the four axes."""

    tp: int
    sp: int
    cfg: int
    dp: int


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Return the place of a rank: tensor parallel fastest, data parallel slowest."""
    rest, tp = divmod(rank, layout.tp)
    rest, sp = divmod(rest, layout.ulysses)
    dp, cfg = divmod(rest, layout.cfg_parallel)
    return Coordinates(tp, sp, cfg, dp)


def rank_groups(layout: Layout) -> dict[str, tuple[tuple[int, ...], ...]]:
    """List the groups of every axis in the fixed order in which all ranks create them.

    `ep` are the ranks that own different MoE heads, `replica` those that render one request, `weights` those
    that gather streamed blocks from each other (empty if none do).
    """
    places = [coordinates(layout, rank) for rank in range(layout.world)]

    def split(key: Callable[[Coordinates], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(key(place), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    data = split(lambda at: (at.tp, at.sp, at.cfg))
    tensor = split(lambda at: (at.sp, at.cfg, at.dp))
    own_experts = split(lambda at: (at.tp, at.sp // layout.expert_ranks, at.cfg, at.dp))
    return {
        "tp": tensor,
        "sp": split(lambda at: (at.tp, at.cfg, at.dp)),
        "cfg": split(lambda at: (at.tp, at.sp, at.dp)),
        "dp": data,
        "ep": tensor if layout.tp > 1 else own_experts,
        "replica": split(lambda at: (at.dp,)),
        "weights": data if layout.is_gathered else (),
        "world": (tuple(range(layout.world)),),
    }


def split_lengths(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` tokens over ranks: contiguous, the first ones a token longer."""
    share, extra = divmod(total, parts)
    return tuple(share + (part < extra) for part in range(parts))


def span(lengths: tuple[int, ...], part: int) -> tuple[int, int]:
    """Return the first element of a part and the one behind its last."""
    bounds = (0, *accumulate(lengths))
    return bounds[part], bounds[part + 1]


def head_counts(num_heads: int, parts: int) -> tuple[int, ...]:
    """Return how many real MoE heads each rank owns.

    Every rank has room for ceil(heads / ranks); what the last ones would hold beyond the real heads is
    never stored or sent, so 12 heads on 8 ranks are 2, 2, 2, 2, 2, 2, 0, 0.
    """
    room = ceil(num_heads / parts)
    return tuple(max(0, min(room, num_heads - part * room)) for part in range(parts))


def check(layout: Layout, model: ModelConfig, *, launched: int | None = None) -> None:
    """Refuse a layout that does not fit the model or the number of ranks that were started.

    Raises:
        LayoutError: Every rule that is broken, in one message.
    """
    problems = _attention_problems(layout, model) + _width_problems(layout, model)
    if launched is not None and launched != layout.world:
        problems.append(
            f"{launched} ranks were launched, but --tp {layout.tp} x --ulysses {layout.ulysses} x "
            f"--cfg-parallel "
            f"{layout.cfg_parallel} x --data-parallel {layout.data_parallel} needs {layout.world}: "
            f"the layout does "
            f"not cover the ranks; launch {layout.world}, or change a degree"
        )
    _raise_if(problems)


def check_released(layout: Layout) -> None:
    """Refuse a layout that does not fit the released model.

    Raises:
        LayoutError: Every rule that is broken, in one message.
    """
    check(layout, ModelConfig.released())


def _degree_problems(layout: Layout) -> list[str]:
    problems = [
        f"--{_dashed(name)} must be one of {', '.join(map(str, allowed))} (got {value})"
        for name, allowed in _DEGREES.items()
        # Large tensor degrees are refused by the model's widths, which say more.
        if not _is_count(value := getattr(layout, name)) or (name != "tp" and value not in allowed)
    ]
    if layout.cfg_parallel not in _DEGREES["cfg_parallel"]:
        problems = [f"{text}: there are two branches" if "cfg" in text else text for text in problems]
    if layout.ep is not None and not _is_count(layout.ep):
        problems.append(f"--ep must be a positive number (got {layout.ep})")
    if layout.resident_blocks != AUTO and not _is_count(layout.resident_blocks, least=0):
        problems.append(f"--resident-blocks must be a count or auto (got {layout.resident_blocks})")
    return problems or _degree_rules(layout)


def _degree_rules(layout: Layout) -> list[str]:
    """Return the broken rules whose message needs numbers."""
    problems = []
    if layout.tp > 1 and layout.ep not in (None, layout.tp):
        problems.append(
            f"--ep {layout.ep} with --tp {layout.tp}: the MoE-head owner is ambiguous, as matrices "
            f"are cut by MoE "
            f"head already; leave --ep out, or set it to {layout.tp}"
        )
    if layout.tp == 1 and layout.ulysses % layout.expert_ranks:
        problems.append(
            f"--ep {layout.ep} does not divide --ulysses {layout.ulysses}: the MoE-head owner is "
            f"ambiguous; set --ep "
            "to a divisor of it"
        )
    if layout.vae_patch_parallel not in (1, layout.world):
        problems.append(
            f"--vae-patch-parallel {layout.vae_patch_parallel}: windows are spread over the whole "
            f"world or not at "
            f"all; set it to 1 or {layout.world}"
        )
    return problems


# What cannot be combined, and the sentence that says so.
_RULES: tuple[tuple[Callable[[Layout], bool], str], ...] = (
    (
        lambda at: at.cfg_parallel > 1 and at.data_parallel > 1,
        "--cfg-parallel 2 with --data-parallel above 1 is not yet combined: set one of them to 1",
    ),
    (
        lambda at: at.data_parallel > 1 and not at.is_gathered,
        (
            "--data-parallel above 1 needs --dlo without --dlo-no-allgather: it exists to share streamed "
            "weights; "
            "run separate engines instead, or set --data-parallel 1"
        ),
    ),
    (
        lambda at: at.data_parallel > 1 and at.tp > 1,
        (
            "--data-parallel above 1 with --tp above 1: a replica is one sequence-parallel group; set "
            "one of them to 1"
        ),
    ),
    (
        lambda at: at.is_gathered and at.data_parallel == 1,
        (
            "--dlo gathers shares over replicas, and there is one: ranks of --ulysses own different MoE "
            "heads; add "
            "--dlo-no-allgather, or raise --data-parallel"
        ),
    ),
    (
        lambda at: at.is_gathered and at.tp > 1,
        (
            "--dlo with --tp above 1 cannot gather, as ranks own different cuts: add --dlo-no-allgather, "
            "or set --tp 1"
        ),
    ),
    (
        lambda at: at.data_parallel > 1 and at.vae_patch_parallel > 1,
        (
            "--vae-patch-parallel with --data-parallel above 1: replicas decode different clips; set "
            "--vae-patch-parallel 1"
        ),
    ),
    (
        lambda at: at.is_gathered and at.data_parallel > 1 and at.cache_dit,
        "--cache-dit with gathered --dlo: ranks may skip different collectives; leave one of them out",
    ),
    (
        lambda at: at.is_gathered and at.resident_blocks != 0,
        (
            "--resident-blocks with gathered --dlo: resident blocks are rank-local; add "
            "--dlo-no-allgather, or set "
            "--resident-blocks 0"
        ),
    ),
    (
        lambda at: not at.is_streamed and at.resident_blocks != 0,
        "--resident-blocks without --dlo or --layerwise: every block is resident already; leave it out",
    ),
    (
        lambda at: at.dlo_no_allgather and not at.dlo,
        "--dlo-no-allgather without --dlo means nothing: add --dlo, or leave it out",
    ),
    (
        lambda at: at.hsdp and (at.tp > 1 or at.data_parallel > 1 or at.dlo or at.layerwise),
        (
            "--hsdp with --tp, --data-parallel, --dlo or --layerwise gives a tensor two owners: leave "
            "--hsdp or the "
            "other out"
        ),
    ),
    (
        lambda at: at.hsdp and at.world == 1,
        "--hsdp on one rank has nothing to shard over: leave it out, or raise --ulysses",
    ),
    (
        lambda at: at.layerwise and (at.world > 1 or at.dlo),
        "--layerwise is the path of a single rank: on several use --dlo, and set every degree to 1 here",
    ),
    (
        lambda at: at.cpu_offload and not at.layerwise,
        "--cpu-offload without --layerwise: the transformer does not fit as a whole; add --layerwise",
    ),
)


def _attention_problems(layout: Layout, model: ModelConfig) -> list[str]:
    ranks = layout.tp * layout.ulysses
    problems = []
    if model.num_heads % ranks:
        problems.append(
            f"{model.num_heads} attention heads do not divide by --tp {layout.tp} x --ulysses "
            f"{layout.ulysses} = "
            f"{ranks}; choose degrees whose product divides {model.num_heads}"
        )
    keys = model.num_query_groups
    keys_of_rank = keys // layout.tp
    if keys % layout.tp or (keys_of_rank % layout.ulysses and layout.ulysses % keys_of_rank):
        problems.append(
            f"{keys} key heads do not divide by --tp {layout.tp} and --ulysses {layout.ulysses}; "
            f"choose smaller degrees"
        )
    return problems


def _width_problems(layout: Layout, model: ModelConfig) -> list[str]:
    moe = model.moe
    num_heads = moe.num_heads if moe.layers else layout.tp
    problems = []
    if num_heads % layout.tp:
        problems.append(
            f"{num_heads} MoE heads do not divide by --tp {layout.tp}; choose a divisor of "
            f"{num_heads}, or use "
            "--ulysses, which needs none"
        )
    widths = {
        "hidden_size": model.hidden_size,
        "dense intermediate width": model.dense_intermediate,
        "routed width": model.routed_width,
        "shared expert width": moe.shared_width,
        "modality expert width": moe.modality_width,
    }
    for name, width in widths.items():
        # Gate and linear rows alternate: whole pairs go to a rank only if the width itself divides.
        if width % layout.tp:
            problems.append(
                f"{name} {width} does not divide by --tp {layout.tp}: the cut would part a gate from "
                f"its linear row; "
                "choose a divisor"
            )
    return problems


def _is_count(value: object, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise LayoutError("; ".join(problems))


def _dashed(name: str) -> str:
    return name.replace("_", "-")
