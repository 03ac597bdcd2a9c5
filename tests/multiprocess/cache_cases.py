"""Cached steps over ranks: only the front layer runs again, on every rank in the same steps."""

from magi2.config import CacheConfig
from magi2.parallel.layout import Layout
from magi2.sampling.cache import cached
from tests.cache_reference import Counts, always_caching
from tests.multiprocess.models import load, solve
from tests.multiprocess.registry import case, groups_of, largest_error
from tests.multiprocess.spawn import Case, World

STEPS = 8
# Every step that warm-up and cap allow: the small models change by less.
FORCED = CacheConfig(threshold=0.99, warmup_steps=2, max_consecutive=3)
CACHED = {
    "cache forced hit: SP4": Layout(ulysses=4),
    "cache forced hit: CFG2SP2": Layout(cfg_parallel=2, ulysses=2),
    "cache forced hit: HSDP4+SP4": Layout(ulysses=4, hsdp=True),
}


def forced_hit(layout: Layout) -> Case:
    def run(at: World) -> None:
        with groups_of(at, layout) as groups:
            model = load(at.folder, "plain", groups)
            native = solve(model, STEPS)
            with always_caching(model, FORCED) as steps:
                want = solve(model, STEPS)
            for _ in range(2):  # the second request starts afresh
                with Counts(model) as counts, cached(model.block, FORCED, STEPS) as cache:
                    assert largest_error(solve(model, STEPS), want) == 0.0
                    assert list(cache.report(groups.replica).cached_steps) == steps == [2, 3, 4, 6, 7]
                assert counts.of == [8, 3, 3, 3]
            assert largest_error(want, native) > 0.01
            assert largest_error(solve(model, STEPS), native) == 0.0

    return run


for _name, _layout in CACHED.items():
    case(4, _name)(forced_hit(_layout))


@case(4, "cache: ranks decide alike")
def alike(at: World) -> None:
    """Thresholds among the changes: the ranks' own tokens alone would not lead all to the same steps."""
    with groups_of(at, Layout(ulysses=4)) as groups:
        model = load(at.folder, "plain", groups)
        taken = []
        for threshold in (0.02, 0.05, 0.1, 0.2, 0.4):
            with cached(model.block, CacheConfig(threshold, 1, 3), STEPS) as cache:
                solve(model, STEPS)
                taken.append(len(cache.report(groups.replica).cached_steps))  # it compares the ranks' steps
        assert min(taken) < max(taken), taken
