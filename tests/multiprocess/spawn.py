"""Several processes as the ranks of one world: started together, reported case by case, killed in time.

A fork server imports torch once for the whole tier. Every rank runs the same named cases; a case fails if it
fails on any rank, with that rank's traceback.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.multiprocess.cases",
        "tests.multiprocess.cache_cases",
        "tests.multiprocess.offload_cases",
        "cache_dit",
        "transformers.models.auto.tokenization_auto",
    ]
)
# A rank waits so long for its peers in one collective of a case, of which some render a clip for comparison
# first; a whole world has `LIMIT_S`.
CASE_TIMEOUT_S = 90.0
LIMIT_S = 400.0


@dataclass(frozen=True)
class World:
    """What a case knows of itself: its rank, the number of ranks, and the folder that all share."""

    rank: int
    size: int
    folder: Path


Case = Callable[[World], None]


@dataclass
class Outcomes:
    """What each rank said of each case: "" for success, else a traceback; and how the processes ended."""

    said: dict[str, dict[int, str]] = field(default_factory=dict)
    exit_codes: list[int | None] = field(default_factory=list)

    def check(self, case: str, num_ranks: int) -> None:
        """Fail with the tracebacks of a case, or if a rank never finished it."""
        said = self.said.get(case, {})
        failures = [f"rank {rank}:\n{text}" for rank, text in sorted(said.items()) if text]
        silent = [rank for rank in range(num_ranks) if rank not in said]
        if silent:
            failures.append(f"ranks {silent} never finished {case}; processes ended with {self.exit_codes}")
        assert not failures, "\n".join(failures)


def run_world(size: int, target: Callable[..., None], *args: object, limit_s: float = LIMIT_S) -> Outcomes:
    """Run `target(rank, size, pipe, *args)` in `size` processes until all have ended, or kill them."""
    outcomes = Outcomes()
    pipes, processes = [], []
    for rank in range(size):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=target, args=(rank, size, writer, *args), daemon=True)
        process.start()
        writer.close()
        pipes.append(reader)
        processes.append(process)
    try:
        _collect(pipes, outcomes, time.monotonic() + limit_s)
    finally:
        for process in processes:
            process.join(timeout=30)  # its pipe is closed: it ends by itself, or hangs
            process.kill()
            process.join()
            outcomes.exit_codes.append(process.exitcode)
            process.close()
    return outcomes


def _collect(pipes: list[Connection], outcomes: Outcomes, deadline: float) -> None:
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            try:
                case, text = pipe.recv()
            except EOFError:
                del open_pipes[pipe]
            else:
                outcomes.said.setdefault(case, {})[open_pipes[pipe]] = text
    for pipe in pipes:
        pipe.close()


@contextmanager
def started(rank: int, size: int, folder: Path):
    """Join a world of gloo ranks that meet in a file of the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'world{size}'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_cases(rank: int, size: int, pipe: Connection, folder: Path, names: Sequence[str]) -> None:
    """Run cases one after the other; all ranks meet after each, whatever came of it."""
    # Imported here: they import this module.
    from tests.multiprocess import cache_cases, cases, offload_cases  # noqa: F401 - they register themselves
    from tests.multiprocess.registry import CASES

    with started(rank, size, folder):
        for name in names:
            try:
                CASES[name](World(rank, size, folder))
                text = ""
            except Exception:  # noqa: BLE001 - whatever it is, it is told with its rank
                text = traceback.format_exc()
            pipe.send((name, text))
            dist.barrier()
    pipe.close()
