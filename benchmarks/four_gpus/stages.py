"""The stages of the qualification: what each runs, how long it may take, which numbers it owes.

Torch-free.
"""

from dataclasses import dataclass

from magi2.parallel.layout import Layout

# Small sizes run on CPUs that others use too.
_PATIENCE_OF_TINY = 5
RATES = (
    "all-to-all of queries, keys and values, 272p",
    "all-to-all of queries, keys and values, 540p",
    "all-to-all of MoE heads, 272p",
    "all-to-all of MoE heads, 540p",
    "all-gather of a streamed layer's shares",
    "all-gather of an HSDP layer's shards",
    "all-reduce of a projection, 540p",
)
STEP = "one 272p step, all layers"
PEAK = "peak device memory over plan"
SAME_AS_TWIN = "values that differ from the resident layers'"
NEAR_ONE_RANK = "worst layer against one rank"
REPEATS = "values that differ when repeated"
SPEED = "540p step, resident"
SPEED_DLO = "540p step, streamed"
EXPOSED = "share of a step that waits for transfers"
# What a CPU cannot measure.
_OF_DEVICES = (PEAK, EXPOSED)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: For `--only`.
        part: Function in the table of `benchmarks.four_gpus.rank`.
        limit_s: After so long all its processes are killed.
        wants: Rows that must have a number.
        layout: Of the engine in it.
        is_single: One process instead of one for each rank; it starts what it needs.
        worlds: Numbers of devices on which it can run.
    """

    name: str
    part: str
    limit_s: float
    wants: tuple[str, ...]
    layout: Layout | None = None
    is_single: bool = False
    worlds: tuple[int, ...] = (4,)

    def wanted(self, *, on_cpu: bool) -> tuple[str, ...]:
        """Return the rows that must have a number on this kind of device."""
        return tuple(row for row in self.wants if not (on_cpu and row in _OF_DEVICES))

    def limit(self, *, is_tiny: bool) -> float:
        """Return the time-out."""
        return self.limit_s * (_PATIENCE_OF_TINY if is_tiny else 1)


_RESIDENT = (NEAR_ONE_RANK, REPEATS, STEP, PEAK)
_EXACT = (NEAR_ONE_RANK, SAME_AS_TWIN, REPEATS, STEP, PEAK)
_LAYOUTS = {
    "sp4": (_RESIDENT, Layout(ulysses=4)),
    "tp4": (_RESIDENT, Layout(tp=4)),
    "tp2sp2": (_RESIDENT, Layout(tp=2, ulysses=2)),
    "cfg2sp2": (_RESIDENT, Layout(cfg_parallel=2, ulysses=2)),
    "hsdp4-sp4": (_EXACT, Layout(ulysses=4, hsdp=True)),
    "hsdp4-cfg2sp2": (_EXACT, Layout(cfg_parallel=2, ulysses=2, hsdp=True)),
    "dlo-dp4": (_EXACT, Layout(data_parallel=4, dlo=True)),
    "dlo-dp2sp2": (_EXACT, Layout(data_parallel=2, ulysses=2, dlo=True)),
    "dlo-sp4": (_EXACT, Layout(ulysses=4, dlo=True, dlo_no_allgather=True)),
}
_SP4, _DLO_SP4 = _LAYOUTS["sp4"][1], _LAYOUTS["dlo-sp4"][1]

STAGES = (
    Stage("link", "link", 150, RATES),
    Stage("link-2", "link", 150, RATES, worlds=(2,)),
    *(Stage(f"layout-{name}", "layout", 240, wants, layout) for name, (wants, layout) in _LAYOUTS.items()),
    Stage("speed-sp4", "speed", 240, (SPEED, PEAK), _SP4),
    Stage("speed-dlo-sp4", "speed", 300, (SPEED_DLO, EXPOSED, PEAK), _DLO_SP4),
    Stage(
        "vae",
        "vae",
        120,
        ("values that differ from one rank's", "540p clip on four ranks", "540p clip on one rank"),
        Layout(ulysses=4, vae_patch_parallel=4),
    ),
    Stage("cache", "cache", 240, ("cached steps of 4", "layers that were left out"), _DLO_SP4),
    Stage("loss", "loss", 240, ("from the kill to the last peer's end",), _SP4, is_single=True),
    Stage(
        "group",
        "group",
        300,
        ("from the kill to the end of the group", "from the end to ready again", "the job on the new ranks"),
        Layout(ulysses=4, vae_patch_parallel=4),
        is_single=True,
    ),
    Stage(
        "agent",
        "agent",
        420,
        ("from the kill to the job's end", "attempts of the job"),
        Layout(ulysses=4, vae_patch_parallel=4),
        is_single=True,
    ),
)
BY_NAME = {stage.name: stage for stage in STAGES}
