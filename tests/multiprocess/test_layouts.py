"""Every layout against one rank, in one spawn a world size; test ids are the cases' names."""

import pytest

from magi2.checkpoint.tiny import write_tiny_checkpoint
from magi2.checkpoint.tiny_vae import write_turbo_vae
from magi2.errors import LayoutError
from magi2.parallel.layout import Layout, check
from tests.golden.discovery import matching
from tests.golden.dit_cases import read_config
from tests.multiprocess import cache_cases  # noqa: F401 - it registers itself
from tests.multiprocess.cases import GOLDEN
from tests.multiprocess.models import write_models
from tests.multiprocess.registry import WORLDS
from tests.multiprocess.spawn import LIMIT_S, Outcomes, run_cases, run_world

pytestmark = pytest.mark.timeout(LIMIT_S + 200)
ALL = [pytest.param(world, name, id=name) for world, names in WORLDS.items() for name in names]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    write_turbo_vae(folder / "turbo_vae", seed=3)
    write_tiny_checkpoint(folder / "tiny")
    return folder


@pytest.fixture(scope="session")
def outcomes_of(models):
    """Run a world's cases at the first question, all in one spawn."""
    done: dict[int, Outcomes] = {}

    def ask(world: int) -> Outcomes:
        if world not in done:
            done[world] = run_world(world, run_cases, models, WORLDS[world])
        return done[world]

    return ask


@pytest.mark.parametrize(("world", "name"), ALL)
def test_case(outcomes_of, world: int, name: str) -> None:
    outcomes_of(world).check(name, world)


@pytest.mark.parametrize("layout", [pytest.param(Layout(tp=2), id="golden full forwards TP2 refused")])
def test_golden_model_is_refused_by_name(layout: Layout) -> None:
    [folder] = {path.parent for path in matching(GOLDEN, "dit", r".*_config\.json")}
    with pytest.raises(LayoutError, match="3 MoE heads do not divide by --tp 2; choose a divisor of 3"):
        check(layout, read_config(folder))
