"""Streamed weights over ranks, and waves of the whole engine; test ids are the cases' names."""

from pathlib import Path

import pytest

from magi2.checkpoint.tiny import write_tiny_checkpoint
from tests.multiprocess.models import write_models
from tests.multiprocess.offload_cases import WORLDS
from tests.multiprocess.spawn import LIMIT_S, Outcomes, run_cases, run_world

ALL = [pytest.param(world, name, id=name) for world, names in WORLDS.items() for name in names]
pytestmark = pytest.mark.timeout(LIMIT_S + 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    write_models(folder)
    write_tiny_checkpoint(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def done() -> dict[int, Outcomes]:
    return {}


@pytest.mark.parametrize(("world", "name"), ALL)
def test_case(folder: Path, done: dict[int, Outcomes], world: int, name: str) -> None:
    """Run a world's cases at the first question, all in one spawn."""
    if world not in done:
        done[world] = run_world(world, run_cases, folder, WORLDS[world])
    done[world].check(name, world)
