"""Cached steps on one rank: a forced hit, a fresh start each time, the plain model afterwards, the report."""

import sys
from collections.abc import Iterator
from pathlib import Path

import cache_dit
import pytest
import torch
from torch import Tensor

from magi2.config import CacheConfig
from magi2.errors import EngineError
from magi2.model.transformer import Magi2Transformer
from magi2.parallel.groups import ALONE, Group
from magi2.sampling.cache import cached, missing_package
from tests.cache_reference import Counts, always_caching
from tests.multiprocess.models import load, solve, write_models

STEPS = 8
FORCED = CacheConfig(threshold=0.99, warmup_steps=2, max_consecutive=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture
def model(models: Path) -> Iterator[Magi2Transformer]:
    loaded = load(models, "plain")
    before = set(vars(loaded.block)), set(vars(loaded.block.layers))
    yield loaded
    assert (set(vars(loaded.block)), set(vars(loaded.block.layers))) == before


def equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("times", [1, 2], ids=["cache forced hit: resident", "cache forced hit: refreshed"])
def test_forced_hit_runs_the_front_layer_alone(model: Magi2Transformer, times: int) -> None:
    native = solve(model, STEPS)
    with always_caching(model, FORCED) as steps:
        want = solve(model, STEPS)
    for _ in range(times):
        with Counts(model) as counts, cached(model.block, FORCED, STEPS) as cache:
            assert equal(solve(model, STEPS), want)
            report = cache.report(ALONE)
        assert counts.of == [8, 3, 3, 3]
    assert report.to_json() == {
        "kind": "cache_dit",
        "num_steps": 8,
        "cached_steps": [2, 3, 4, 6, 7],
        "threshold": 0.99,
        "warmup_steps": 2,
        "max_consecutive": 3,
    }
    assert steps == [2, 3, 4, 6, 7]
    assert not equal(want, native)
    with Counts(model) as counts:
        assert equal(solve(model, STEPS), native)
    assert counts.of == [8, 8, 8, 8]


def test_step_that_changes_too_much_is_computed(model: Magi2Transformer) -> None:
    native = solve(model, STEPS)
    with cached(model.block, CacheConfig(threshold=1e-6, warmup_steps=1, max_consecutive=3), STEPS) as cache:
        assert equal(solve(model, STEPS), native)
        assert cache.report(ALONE).cached_steps == ()


def test_warmup_of_the_whole_run_caches_nothing(model: Magi2Transformer) -> None:
    with cached(model.block, CacheConfig(threshold=0.99, warmup_steps=4), 4) as cache:
        solve(model, 4)
        assert cache.report(ALONE).cached_steps == ()


def test_run_that_fails_leaves_the_plain_model(model: Magi2Transformer) -> None:
    native = solve(model, 3)
    running = cached(model.block, FORCED, STEPS)
    running.__enter__()
    solve(model, 3)
    failure = RuntimeError("in mid-run")
    assert not running.__exit__(RuntimeError, failure, None)
    assert equal(solve(model, 3), native)


def test_mark_of_another_engine_hides_no_cache(model: Magi2Transformer) -> None:
    cache_dit.caching.FakeDiffusionPipeline._is_cached = True
    with Counts(model) as counts, cached(model.block, FORCED, STEPS):
        solve(model, STEPS)
    assert counts.of == [8, 3, 3, 3]
    assert "_is_cached" not in vars(cache_dit.caching.FakeDiffusionPipeline)


def test_ranks_that_took_other_steps_are_an_error(model: Magi2Transformer) -> None:
    class Diverged(Group):
        def stack(self, x: Tensor) -> Tensor:
            return torch.stack([x, torch.zeros_like(x)])

    with cached(model.block, FORCED, STEPS) as cache:
        solve(model, STEPS)
        with pytest.raises(EngineError, match="different steps from the cache"):
            cache.report(Diverged())


def test_package_says_nothing_on_stdout(model: Magi2Transformer, capfd: pytest.CaptureFixture[str]) -> None:
    with cached(model.block, FORCED, STEPS):
        solve(model, STEPS)
    assert capfd.readouterr().out == ""


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_package() is None
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "cache_dit")
    assert "pip install 'magi2-farm[cache]'" in str(missing_package())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold": 0.0}, "threshold must lie between 0 and 1"),
        ({"threshold": 1.0}, "threshold must lie between 0 and 1"),
        ({"warmup_steps": 0}, "must be at least one step"),
        ({"max_consecutive": 0}, "must be at least one step"),
    ],
)
def test_numbers_out_of_range_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**values)


def test_profile_row_names_the_numbers() -> None:
    row = {"ulysses": 4, "cache_threshold": 0.1, "cache_max_consecutive": 2, "cache_dit": "on"}
    assert CacheConfig.from_row(row) == CacheConfig(threshold=0.1, max_consecutive=2)
