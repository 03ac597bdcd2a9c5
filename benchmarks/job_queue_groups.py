"""Groups without a worker: threads in processes of their own that do to the database what an agent does.

`work` claims and finishes jobs in so many threads and returns how long each claim took, so that the queue can
be measured without the cost of checking, cutting and storing clips.
"""

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from sqlalchemy import Engine

from farm.db.session import make_engine, unit_of_work
from farm.jobs import lifecycle
from farm.jobs.claim import claim
from farm.jobs.job import NewAsset, Rules
from farm.jobs.lifecycle import Result
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.settings import load_settings
from magi2.contract import CONTRACT_VERSION

PROFILE = "tiny-cpu"
KINDS = ("video", "thumb", "sprite", "audio", "meta")
IDLE_S = 0.01


@dataclass(frozen=True)
class Orders:
    """What the groups of one process shall do."""

    variables: dict[str, str]  # names of settings and their values
    groups: tuple[int, ...]
    rules: Rules
    does_render: bool = (
        True  # go through all states; otherwise give up at once, which frees the account's place
    )
    num_beats: int = 1
    quiet_s: float = 2.0  # without work for so long, a group leaves
    timeout_s: float = 600.0


@dataclass
class Done:
    """What groups have done."""

    claims: list[tuple[str, int, float]] = field(default_factory=list)  # job, epoch, seconds of the claim


def work(orders: Orders, num_processes: int) -> Done:
    """Spread the groups over processes and return what all of them did."""
    shares = [orders.groups[number::num_processes] for number in range(num_processes)]
    plans = [Orders(**{**vars(orders), "groups": share}) for share in shares if share]
    with multiprocessing.get_context("spawn").Pool(len(plans)) as pool:
        done = pool.map(work_here, plans, chunksize=1)
    return Done([claim for each in done for claim in each.claims])


def work_here(orders: Orders) -> Done:
    """Run the groups of this process until nothing is left."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    settings = load_settings(None, overrides=orders.variables)
    engine = make_engine(settings, application="agent", pool_size=len(orders.groups))
    done = Done()
    acts = [threading.Thread(target=_serve, args=(engine, orders, number, done)) for number in orders.groups]
    for thread in acts:
        thread.start()
    for thread in acts:
        thread.join()
    engine.dispose()
    return done


def _serve(engine: Engine, orders: Orders, number: int, done: Done) -> None:
    finish: Callable[..., None] = _render if orders.does_render else _give_up
    until_s = time.monotonic() + orders.timeout_s
    quiet_since_s = time.monotonic()
    while time.monotonic() < min(until_s, quiet_since_s + orders.quiet_s):
        begun_s = time.perf_counter()
        with unit_of_work(engine) as conn:
            claimed = claim(
                conn, f"group_{number}", PROFILE, "boot_bench", [CONTRACT_VERSION], rules=orders.rules
            )
        if claimed is None:
            time.sleep(IDLE_S)
            continue
        job = claimed.job
        done.claims.append((job.id, job.epoch, time.perf_counter() - begun_s))
        finish(engine, orders, job.id, job.epoch, f"group_{number}")
        quiet_since_s = time.monotonic()


def _render(engine: Engine, orders: Orders, job_id: str, epoch: int, group_id: str) -> None:
    with unit_of_work(engine) as conn:
        lifecycle.mark_running(conn, job_id, epoch)
    for step in range(orders.num_beats):
        with unit_of_work(engine) as conn:
            lifecycle.beat(conn, job_id, epoch, group_id, Progress("denoise", step, 4), rules=orders.rules)
    with unit_of_work(engine) as conn:
        lifecycle.mark_uploading(conn, job_id, epoch)
    assets = [NewAsset(kind, f"v1/bench/{job_id}/{kind}", 1, "0" * 64, "application/json") for kind in KINDS]
    with unit_of_work(engine) as conn:
        lifecycle.succeed(conn, job_id, epoch, Result({"bytes": 1}, assets))


def _give_up(engine: Engine, orders: Orders, job_id: str, epoch: int, _: str) -> None:
    with unit_of_work(engine) as conn:
        lifecycle.fail(conn, job_id, epoch, Failure(FailureKind.INVALID_INPUT, "bench"), rules=orders.rules)
