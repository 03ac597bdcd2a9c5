"""What the ranks of one start have said so far: who is loaded, who moves, what came out, who failed first.

Written by the reader threads, read by the supervisor and the heartbeat, all under one condition. A group
makes a new board for every start of its ranks, so nothing of dead ranks can be taken for news of living ones.
A run is named by a token; what carries another token is stale and dropped. The board decides nothing.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker import protocol
from worker.engine_api import EngineFault, InvalidInput, Outcome, RenderResult, Stopped, fault_of
from worker.liveness import RankWatch, StallLimits
from worker.protocol import Message, ProtocolError


@dataclass(frozen=True)
class WorkReport:
    """The newest report of rank 0 about one request."""

    request_id: str
    phase: str
    step: int
    total: int


@dataclass(frozen=True, eq=False)
class Crash:
    """A rank's first failure outside the typed errors, and what is known of it.

    `at_s` is its moment on the host's monotonic clock: the rank's own where it said why, the reader's where
    the process just ended.
    """

    rank: int
    message: str
    details: dict[str, Any]
    at_s: float


@dataclass
class Run:
    """One call of the engine on all ranks, while it lasts.

    `owners` says which rank answers for a request, if not rank 0; `outcomes` is there once all are answered,
    until then they gather in `answers`.
    """

    token: str
    request_ids: list[str]
    owners: dict[str, int] = field(default_factory=dict)
    answers: dict[str, Outcome] = field(default_factory=dict)
    outcomes: dict[str, Outcome] | None = None
    done: set[int] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    fault: EngineFault | None = None
    news: dict[str, WorkReport] = field(default_factory=dict)

    @property
    def is_wave(self) -> bool:
        """Tell whether ranks other than rank 0 answer for requests."""
        return any(self.owners.values())


class RankBoard:
    """The board of `world` ranks that were just started."""

    def __init__(self, world: int) -> None:
        """Expect all ranks to load now."""
        now = time.monotonic()
        self._changed = threading.Condition()
        self._watches = [RankWatch(now, phase="load") for _ in range(world)]
        self._fingerprints: dict[int, dict[str, str]] = {}
        self._pongs: dict[int, int] = {}
        self._crashes: dict[int, Crash] = {}
        self._run: Run | None = None
        self._refused: tuple[str, dict[str, EngineFault]] | None = None
        self._load_news: WorkReport | None = None

    @property
    def is_loaded(self) -> bool:
        """Tell whether all ranks are loaded and none has failed."""
        with self._changed:
            return len(self._fingerprints) == len(self._watches) and not self._crashes

    @property
    def fingerprint(self) -> dict[str, str]:
        """What rank 0 said of its engine when it was loaded."""
        with self._changed:
            return dict(self._fingerprints.get(0, {}))

    @property
    def crash(self) -> Crash | None:
        """The failure that was noted first, if any."""
        with self._changed:
            return next(iter(self._crashes.values()), None)

    @property
    def median_step_s(self) -> float:
        """Median duration of a denoising step on rank 0."""
        with self._changed:
            return self._watches[0].median_step_s

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message arrives; one that arrived just before costs the whole time-out."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wait_for_crashes(self, count: int, timeout_s: float) -> list[Crash]:
        """Wait until this many ranks have failed or time is up; return the failures as they were noted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._crashes) >= count, timeout=timeout_s)
            return list(self._crashes.values())

    def have_answered(self, number: int) -> bool:
        """Tell whether all ranks have answered this ping."""
        with self._changed:
            return all(self._pongs.get(rank) == number for rank in range(len(self._watches)))

    def take_load_news(self) -> WorkReport | None:
        """Return the newest report of loading, once."""
        with self._changed:
            news, self._load_news = self._load_news, None
            return news

    def take_refused(self, token: str) -> dict[str, EngineFault] | None:
        """Return the answer to a validation once it is there: what was refused, by request id."""
        with self._changed:
            if self._refused is None or self._refused[0] != token:
                return None
            return self._refused[1]

    def take_dropped(self, run: Run) -> set[str]:
        """Return the requests that the engine has turned into ghosts since the last question."""
        with self._changed:
            dropped, run.dropped = run.dropped, set()
            return dropped

    def begin(self, run: Run) -> None:
        """Expect reports and outcomes of this run from now on."""
        with self._changed:
            self._run = run
            for watch in self._watches:
                watch.begin_run(time.monotonic())

    def end(self) -> None:
        """Expect nothing more of the run."""
        with self._changed:
            self._run = None

    def look(self, run: Run) -> tuple[list[WorkReport], dict[str, Outcome] | None, bool]:
        """Return the newest report of each request (once), all outcomes or None, and whether all is said."""
        with self._changed:
            news, run.news = run.news, {}
            is_over = len(run.done) == len(self._watches) or bool(self._crashes)
            return list(news.values()), run.outcomes, is_over

    def stall(self, limits: StallLimits, *, on_cpu: bool) -> str | None:
        """Say which rank shows no progress for longer than its phase allows, if one does."""
        now = time.monotonic()
        with self._changed:
            for rank, watch in enumerate(self._watches):
                stall = watch.stall(limits, now, on_cpu=on_cpu)
                if stall is not None:
                    return f"rank {rank}: {stall}"
        return None

    def is_running(self) -> bool:
        """Tell whether a run is going on whose outcomes are not known yet."""
        with self._changed:
            return self._run is not None and self._run.outcomes is None

    def take(self, rank: int, message: Message | None) -> None:
        """Take in one message of a rank, or None at the end of its pipe; called by its reader thread."""
        with self._changed:
            try:
                self._take(rank, message)
            except (ProtocolError, KeyError, TypeError, ValueError) as error:
                self._note_crash(rank, f"broke the protocol: {error}", {})
            self._changed.notify_all()

    def _take(self, rank: int, message: Message | None) -> None:
        if message is None:
            self._note_crash(rank, "the process ended", {})
            return
        kind = message["type"]
        if kind == protocol.TICK:
            self._watches[rank].saw_tick(message, time.monotonic())
        elif kind == protocol.READY:
            self._fingerprints[rank] = dict(message["fingerprint"])
        elif kind == protocol.PONG:
            self._pongs[rank] = message["n"]
        elif kind == protocol.CRASH:
            details = {
                name: value for name, value in message.items() if name not in {"type", "message", "at_s"}
            }
            self._note_crash(rank, str(message["message"]), details, at_s=message.get("at_s"))
        elif kind == protocol.PROGRESS:
            self._take_progress(rank, message)
        elif kind in {protocol.RESULT, protocol.DONE}:
            self._take_outcomes(rank, message)
        else:
            self._take_other(kind, message)

    def _take_other(self, kind: str, message: Message) -> None:
        if kind == protocol.VALIDATED:
            faults = {name: fault_of(fault) for name, fault in message["faults"].items()}
            self._refused = (message["token"], faults)
        elif kind == protocol.DROPPED:
            if self._run is not None and message["token"] == self._run.token:
                self._run.dropped.update(message["request_ids"])
        elif kind != protocol.HELLO:
            raise ProtocolError(f"unknown message {kind!r}")

    def _take_progress(self, rank: int, message: Message) -> None:
        step, total = int(message["step"]), int(message["total"])
        report = WorkReport(message["request_id"], message["phase"], step, total)
        self._watches[rank].saw_work(report.phase, report.step, time.monotonic())
        if self._run is None:
            self._load_news = report
        elif message["token"] == self._run.token:
            self._run.news[report.request_id] = report

    def _take_outcomes(self, rank: int, message: Message) -> None:
        run = self._run
        if run is None or message["token"] != run.token:
            return
        outcomes = {name: _outcome_of(wire) for name, wire in message["outcomes"].items()}
        run.done.add(rank)
        mine = [name for name in run.request_ids if run.owners.get(name, 0) == rank]
        missing = [name for name in mine if name not in outcomes]
        if missing:
            raise ProtocolError(f"no outcome for {missing}")
        run.answers |= {name: outcomes[name] for name in mine}
        if len(run.answers) == len(run.request_ids):
            run.outcomes = run.answers
        for name, outcome in outcomes.items():
            # What every rank refuses alike needs no help; a fault of one leaves the others waiting for it.
            if isinstance(outcome, InvalidInput | Stopped) or name in mine:
                continue
            if isinstance(outcome, EngineFault):
                run.fault = outcome

    def _note_crash(
        self, rank: int, message: str, details: dict[str, Any], at_s: float | None = None
    ) -> None:
        if rank not in self._crashes:
            watch = self._watches[rank]
            evidence = {"rank": rank, "phase": watch.phase, "step": watch.step, **details}
            moment_s = time.monotonic() if at_s is None else float(at_s)
            self._crashes[rank] = Crash(rank, message, evidence, moment_s)


def first_cause(failures: Mapping[Crash, int | None]) -> Crash:
    """Return the failure that made the others, of those that came close together, given their exit statuses.

    A rank that lost its peer says so and leaves; its word may arrive before the news of the peer. So a rank
    that ended without a word comes before all that said why, and among equals the earlier goes first.
    """
    return min(failures, key=lambda crash: (failures[crash] == protocol.CRASH_EXIT_CODE, crash.at_s))


def _outcome_of(wire: Message) -> Outcome:
    if "fault" in wire:
        return fault_of(wire["fault"])
    return RenderResult(str(wire["path"]), dict(wire["stats"]))
