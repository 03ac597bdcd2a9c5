"""A rank that dies, raises or stalls: its peer ends with a named error inside the time-out."""

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from magi2.errors import PeerLost
from magi2.parallel.groups import open_groups
from magi2.parallel.layout import Layout
from tests.multiprocess.models import load, predict, write_models
from tests.multiprocess.spawn import run_world, started

# Long enough for a peer that only waits for a processor.
TIMEOUT_S = 8.0
LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(LIMIT_S + 100)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    write_models(folder)
    return folder


def die() -> None:
    os._exit(3)


def fail() -> None:
    raise RuntimeError("the engine of this rank failed")


def stall() -> None:
    time.sleep(2 * TIMEOUT_S)


def lose_a_peer(
    rank: int, size: int, pipe: Connection, folder: Path, meeting: str, end: Callable[[], None]
) -> None:
    """Run one step together; then rank 1 ends as told while rank 0 goes on."""
    (folder / meeting).mkdir(exist_ok=True)
    with (
        started(rank, size, folder / meeting),
        open_groups(Layout(ulysses=2), rank, timeout_s=TIMEOUT_S) as groups,
    ):
        model = load(folder, "plain", groups)
        predict(model)
        if rank == 1:
            end()
        try:
            predict(model)
        except PeerLost as error:
            pipe.send((meeting, str(error)))
            pipe.close()
            os._exit(0)


@pytest.mark.parametrize("end", [die, fail, stall], ids=["rank dies", "rank raises", "rank stalls"])
def test_peer_of_a_lost_rank_ends_with_a_named_error(models: Path, end: Callable[[], None]) -> None:
    outcomes = run_world(2, lose_a_peer, models, end.__name__, end, limit_s=LIMIT_S)
    said = outcomes.said[end.__name__][0]
    assert said.startswith(
        "exchange in the group sp failed: a peer rank is gone or late, so this rank must end"
    )
    assert outcomes.exit_codes[0] == 0


def leave_early(rank: int, size: int, pipe: Connection, folder: Path) -> None:
    """Rank 1 never takes part in the creation of the groups."""
    with started(rank, size, folder):
        if rank == 1:
            die()
        try:
            with open_groups(Layout(ulysses=2), rank, timeout_s=TIMEOUT_S):
                pipe.send(("creation", ""))
        except PeerLost as error:
            pipe.send(("creation", str(error)))
        pipe.close()
        os._exit(0)


def test_creation_without_a_peer_ends_with_a_named_error(tmp_path: Path) -> None:
    outcomes = run_world(2, leave_early, tmp_path, limit_s=LIMIT_S)
    assert outcomes.said["creation"][0].startswith(
        "creation in the group sp failed: a peer rank is gone or late"
    )


def test_group_of_one_returns_what_it_is_given() -> None:
    with open_groups(Layout(), 0) as groups:
        x = torch.arange(6.0).view(3, 2)
        assert groups.sp.add_up(x) is x
        assert torch.equal(groups.world.stack(x), x[None])
        assert groups.sp.join_rows(x, (3,)) is x
        assert groups.replica.agree(wanted=True)
        assert groups.replica.share([x], x.device) == [x]
        assert torch.equal(groups.ep.exchange(x.view(-1), [6], (2, 3), [6]).wait(), x.view(2, 3))
