"""One attempt at one job: its lease, its temporary folder, its input, and how it may end early.

Every step first asks whether the job is still ours and still wanted, and leaves by one of the exceptions
here if not. Every write names the epoch, and is repeated while the database is away and the lease lasts.
It knows neither Celery nor processes; the files of a finished render are the business of
`worker/outputs.py`.
"""

import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from farm.db.session import unit_of_work
from farm.jobs import lifecycle
from farm.jobs.job import Claimed, Rules
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.queries import get_input
from farm.progress import ProgressPublisher
from farm.storage import DigestMismatchError, ObjectMissingError, ObjectStore, StorageError
from magi2.contract import GenerationRequest, Limits, problems_of
from worker.board import WorkReport
from worker.engine_api import EngineFault, InvalidInput, Outcome, OutOfMemory, RenderRequest, RenderResult
from worker.group import Stop
from worker.heartbeat import Lease

log = structlog.get_logger(__name__)

T = TypeVar("T")

STORE_TRIES = 5
STORE_WAIT_S = 1.0
WRITE_TRIES = 60
WRITE_WAIT_S = 1.0
JITTER = 0.2
MAX_DETAIL_CHARS = 8_000


class AttemptOverError(Exception):
    """The attempt ends here without a result."""


class LeaseLostError(AttemptOverError):
    """The job is no longer ours: it must not be touched again."""


class CanceledError(AttemptOverError):
    """Somebody asked for the end of the job."""


class PreemptedError(AttemptOverError):
    """This agent must leave; the job goes back to the queue."""


class AttemptFailedError(AttemptOverError):
    """The attempt failed in a way that the failure table knows."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind)
        self.failure = failure


@dataclass(frozen=True)
class Tools:
    """What all attempts of one agent share."""

    database: Engine
    store: ObjectStore
    publisher: ProgressPublisher
    rules: Rules
    limits: Limits
    roomier: Callable[[GenerationRequest], str | None]
    must_leave: Callable[[], bool]
    pause: Callable[[float], object]


@dataclass
class Attempt:
    """A claimed job while this agent works on it."""

    claimed: Claimed
    lease: Lease
    folder: Path
    tools: Tools
    timings: dict[str, float] = field(default_factory=dict)
    is_running: bool = False
    is_over: bool = False  # its end is recorded, or it is no longer ours
    peaks: Callable[[], dict[str, Any]] | None = None  # of memory until now, where the agent measures
    neighbours: int = 0  # other jobs that the ranks work on beside it
    _percent: int = 0

    @property
    def token(self) -> str:
        """Name this attempt towards the ranks, so that nothing of another attempt is taken for it."""
        return f"{self.claimed.job.id}.e{self.claimed.epoch}"

    @property
    def request(self) -> GenerationRequest:
        """The stored request, complete and validated at submit."""
        return GenerationRequest.from_json(self.claimed.job.params)

    @property
    def measured(self) -> dict[str, Any] | None:
        """The peaks of memory until now, or of the finished render; None where nobody measures."""
        return None if self.peaks is None else self.peaks()

    def open(self) -> None:
        """Make the temporary folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Remove the temporary folder with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def ensure_wanted(self) -> None:
        """Leave if the job is lost, canceled, to be given back, or out of time.

        Raises:
            LeaseLostError, CanceledError, PreemptedError, AttemptFailedError: As their names say.
        """
        if self.lease.lost:
            raise LeaseLostError(self.lease.lost)
        if self.lease.cancel_requested:
            raise CanceledError
        if self.tools.must_leave():
            raise PreemptedError
        if self.lease.deadline_passed:
            raise AttemptFailedError(Failure(FailureKind.DEADLINE))

    def stop_order(self) -> Stop:
        """Say whether the ranks shall go on, stop at the next step, or be killed; asked all the time."""
        self.tools.publisher.flush()
        try:
            self.ensure_wanted()
        except LeaseLostError:
            return Stop.NOW if self.lease.is_stalled else Stop.AT_STEP
        except PreemptedError:
            return Stop.NOW
        except AttemptOverError:
            return Stop.AT_STEP
        return Stop.GO_ON

    def write(self, act: Callable[[Connection], T]) -> T:
        """Run one unit of work, again and again while the database is away and the lease lasts.

        Raises:
            LeaseLostError: The lease ended first.
        """
        for tries_left in reversed(range(WRITE_TRIES)):
            if self.lease.lost:
                raise LeaseLostError(self.lease.lost)
            try:
                with unit_of_work(self.tools.database) as conn:
                    return act(conn)
            except (OperationalError, InterfaceError, PoolTimeoutError) as error:
                log.warning("write_failed", job_id=self.lease.job_id, err=_name_of(error))
                if tries_left == 0:
                    raise
                self.tools.pause(WRITE_WAIT_S)
        raise AssertionError("unreachable: the last try returns or raises")

    def fenced(self, accepted: object, what: str) -> None:
        """Take the answer of a fenced write.

        Raises:
            LeaseLostError: The write changed nothing, since the job has a newer epoch or has ended.
        """
        if not accepted:
            self.lease.lose(f"fenced out at {what}")
            raise LeaseLostError(self.lease.lost)

    def with_store(self, act: Callable[[], T]) -> T:
        """Talk to the object store, up to five times with growing pauses.

        Raises:
            StorageError: It failed five times.
            AttemptOverError: The job was lost or called off meanwhile.
        """
        for attempt in range(STORE_TRIES):
            self.ensure_wanted()
            try:
                return act()
            except ObjectMissingError:
                raise
            except StorageError as error:
                log.warning("store_failed", job_id=self.lease.job_id, err=_name_of(error))
                if attempt == STORE_TRIES - 1:
                    raise
                self.tools.pause(STORE_WAIT_S * 2**attempt * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - spreads retries
        raise AssertionError("unreachable: the last try returns or raises")

    def fetch_input(self) -> RenderRequest:
        """Check the request once more, and fetch its image, if it has one, from the farm's own bucket.

        Raises:
            AttemptFailedError: The request breaks a rule of today, or its image cannot be had.
        """
        self.note(Progress("fetch_input"))
        request = self.request
        problems = problems_of(request, self.tools.limits)
        if problems:
            text = "; ".join(problem.message for problem in problems)
            raise AttemptFailedError(Failure(FailureKind.INVALID_INPUT, message=text))
        image = self._fetch_image() if request.has_image else None
        return RenderRequest(self.token, request.to_json(), image, str(self.folder / "video.mp4"))

    def _fetch_image(self) -> str:
        asset = self.write(lambda conn: get_input(conn, self.claimed.job))
        gone = "the input image is no longer stored; submit the request again with its image"
        if asset is None or asset.deleted_at is not None:
            raise AttemptFailedError(Failure(FailureKind.INVALID_INPUT, message=gone))
        path = self.folder / "input.png"
        try:
            stored = self.with_store(lambda: self.tools.store.get_to_file(asset.key, path))
            if stored.sha256 != asset.sha256:
                raise DigestMismatchError("the stored image is not the one that was sent")
        except ObjectMissingError as error:
            raise AttemptFailedError(Failure(FailureKind.INVALID_INPUT, message=gone)) from error
        except StorageError as error:
            detail = {"during": "fetch_input", "error": error.message}
            raise AttemptFailedError(Failure(FailureKind.UPLOAD, detail=detail)) from error
        return str(path)

    def take(self, report: WorkReport) -> None:
        """Take in a report of rank 0; the first one makes the job `running`.

        A lost lease is only noted: the ranks must be stopped in good order, which `stop_order` will ask for.
        """
        try:
            self._begin_running()
        except LeaseLostError:
            return
        self.note(Progress(report.phase, report.step, report.total))

    def _begin_running(self) -> None:
        if self.is_running:
            return
        lease = self.lease
        marked = self.write(lambda conn: lifecycle.mark_running(conn, lease.job_id, lease.epoch))
        self.fenced(marked, "running")
        self.is_running = True

    def note(self, progress: Progress) -> None:
        """Keep a progress for the next heartbeat and tell live listeners; it never goes back."""
        self.lease.progress = progress
        self._percent = max(self._percent, progress.percent)
        self.tools.publisher.publish(
            self.lease.job_id,
            {
                "epoch": self.lease.epoch,
                "phase": progress.phase,
                "step": progress.step,
                "total": progress.total,
                "progress": self._percent,
            },
        )

    def accept(self, outcome: Outcome) -> RenderResult:
        """Return a finished render; turn everything else into the way in which the attempt ends."""
        if self.lease.lost:
            raise LeaseLostError(self.lease.lost)
        if isinstance(outcome, RenderResult):
            self._begin_running()  # where the ranks were done before their first report was looked at
            return outcome
        if outcome.kind == "stopped":
            self.ensure_wanted()
        raise AttemptFailedError(self._failure_of(outcome))

    def _failure_of(self, fault: EngineFault) -> Failure:
        detail = {"kind": fault.kind, "error": str(fault), **fault.details()}
        if isinstance(fault, InvalidInput):
            return Failure(FailureKind.INVALID_INPUT, message=str(fault), detail=plain(detail))
        if isinstance(fault, OutOfMemory):
            roomier = self.tools.roomier(self.request)
            return Failure(FailureKind.OUT_OF_MEMORY, detail=plain(detail), roomier_profile=roomier)
        return Failure(FailureKind.ENGINE_ERROR, detail=plain(detail))

    def fail(self, failure: Failure) -> None:
        """End the attempt by the failure table, if the job is still ours."""
        measured = self.measured
        job = self.write(
            lambda conn: lifecycle.fail(
                conn,
                self.lease.job_id,
                self.lease.epoch,
                failure,
                rules=self.tools.rules,
                measured=measured,
            )
        )
        log.warning(
            "attempt_failed",
            job_id=self.lease.job_id,
            epoch=self.lease.epoch,
            err=failure.kind.value,
            state=job.state.value if job else "fenced",
        )

    def give_back(self) -> None:
        """Put the job back near the front of the queue, for another group."""
        self.write(lambda conn: lifecycle.release(conn, self.lease.job_id, self.lease.epoch))

    def finish_cancel(self) -> None:
        """Record that the ranks have stopped for a cancel."""
        self.write(lambda conn: lifecycle.finish_cancel(conn, self.lease.job_id, self.lease.epoch))


class Stopwatch:
    """Times a named stretch of an attempt: `with Stopwatch(attempt, "render"): ...`."""

    def __init__(self, attempt: Attempt, name: str) -> None:
        self._timings = attempt.timings
        self._name = name
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._timings[self._name] = round(time.monotonic() - self._started, 3)


def _name_of(error: Exception) -> str:
    return type(error.__cause__ or error).__name__


def plain(value: Any) -> Any:
    """Return evidence that PostgreSQL can store as JSON: no NUL, no lone surrogates, no endless text."""
    if isinstance(value, str):
        return value[-MAX_DETAIL_CHARS:].encode("utf-8", "replace").decode("utf-8").replace("\0", "")
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
