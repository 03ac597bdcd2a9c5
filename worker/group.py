"""A group: the devices of one agent and the ranks that stay warm on them between jobs.

`start`, `run`, `kill` and `close` belong to one supervisor thread, which must live as long as the agent;
`stall` and the read-only properties may be asked from any thread. The group lives or dies as a whole: if one
rank ends, fails outside the typed errors or does not stop in time, all are killed and seen to be gone, and
the caller decides when to start them again. It knows nothing of jobs, leases or the database.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from worker import protocol
from worker.board import Crash, RankBoard, Run, WorkReport, first_cause
from worker.devices import free_port, rank_environment
from worker.engine_api import (
    EngineFault,
    LoadSpec,
    Outcome,
    OutOfMemory,
    RenderRequest,
    Stopped,
    num_slots_of,
    output_rank,
)
from worker.liveness import StallLimits
from worker.protocol import ProtocolError
from worker.rank_process import RankProcess, RankSpec

POLL_S = 0.1
CRASH_NEWS_S = 1.0


@dataclass(frozen=True)
class GroupSpec:
    """What the ranks of a group are started with."""

    profile: str
    engine: str
    devices: tuple[int, ...]
    world: int
    ckpt_root: str | None
    deterministic: bool
    environment: Mapping[str, str]
    log_dir: Path
    layout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """How many requests its ranks run side by side."""
        return num_slots_of(self.layout)


@dataclass(frozen=True)
class GroupTimes:
    """How long a group waits for its ranks before it loses patience, in seconds."""

    stall: StallLimits = field(default_factory=StallLimits)
    cancel_grace_s: float = 30.0
    cancel_steps: float = 3.0
    late_rank_s: float = 10.0
    ping_s: float = 5.0
    validate_s: float = 180.0
    term_s: float = 5.0
    kill_s: float = 10.0


class Stop(Enum):
    """What the caller of `run` wants: go on, leave together at the next step boundary, or be killed now."""

    GO_ON = "go_on"
    AT_STEP = "at_step"
    NOW = "now"


class GroupCrashError(Exception):
    """A rank ended or broke the protocol; all ranks are gone. `evidence` is for operators."""

    def __init__(self, message: str, evidence: dict[str, Any]) -> None:
        super().__init__(message)
        self.evidence = evidence


@dataclass(frozen=True)
class Members:
    """Talk about single requests of a wave while it runs, both called in the supervisor's thread.

    `called_off` says which requests shall become ghosts (it only grows); `on_dropped` hears when the engine
    has made one of them so.
    """

    called_off: Callable[[], frozenset[str]]
    on_dropped: Callable[[str], None]


_NO_MEMBERS = Members(frozenset, lambda _: None)


class GroupStuckError(Exception):
    """Processes of the group could not be killed; its devices cannot be trusted."""


@dataclass
class _Patience:
    """The moments at which a run is no longer waited for; None while there is no reason to hurry."""

    cancel_until: float | None = None
    late_until: float | None = None


class GpuGroup:
    """N ranks under one supervisor thread."""

    def __init__(self, spec: GroupSpec, times: GroupTimes | None = None) -> None:
        """Remember what to start; nothing is started yet."""
        self.spec = spec
        self._times = times or GroupTimes()
        self._ranks: list[RankProcess] = []
        self._board: RankBoard | None = None
        self._owner: int | None = None
        self._num_pings = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [rank.pid for rank in self._ranks]

    @property
    def is_ready(self) -> bool:
        """Tell whether all ranks are loaded and none has failed since."""
        board = self._board
        return board is not None and board.is_loaded

    @property
    def fingerprint(self) -> dict[str, str]:
        """What rank 0 said of its engine when it was ready; empty before."""
        board = self._board
        return board.fingerprint if board else {}

    def start(
        self,
        *,
        give_up: Callable[[], bool] = lambda: False,
        on_progress: Callable[[WorkReport], None] = lambda _: None,
        on_started: Callable[[list[int]], None] = lambda _: None,
    ) -> bool:
        """Start all ranks and wait until they are loaded; False if `give_up` said so first.

        Raises:
            GroupCrashError: A rank failed or took longer than loading may.
            GroupStuckError: Ranks could not be killed.
        """
        self._claim_thread()
        self.kill()
        self._board = board = RankBoard(self.spec.world)
        try:
            self._spawn(board)
            on_started(self.pids)
            while not board.is_loaded:
                self._raise_if_failed(board, stall=board.stall(self._times.stall, on_cpu=self._on_cpu))
                if give_up():
                    self.kill()
                    return False
                news = board.take_load_news()
                if news is not None:
                    on_progress(news)
                board.wait(POLL_S)
        except (GroupCrashError, ProtocolError, OSError) as error:
            raise self._bury(board, error) from error
        return True

    def answers(self) -> bool:
        """Ping all ranks; False if one is dead or does not answer soon."""
        board = self._board
        if board is None:
            return False
        self._num_pings += 1
        try:
            self._send_all(protocol.PING, n=self._num_pings)
        except ProtocolError:
            return False
        deadline = time.monotonic() + self._times.ping_s
        while board.is_loaded and time.monotonic() < deadline:
            if board.have_answered(self._num_pings):
                return True
            board.wait(POLL_S)
        return False

    def validate(self, requests: Sequence[RenderRequest], token: str) -> dict[str, EngineFault]:
        """Have rank 0 check requests on the host; return those that it refuses, by request id.

        Raises:
            GroupCrashError: It failed or did not answer; all ranks are gone.
            GroupStuckError: Ranks could not be killed.
        """
        self._claim_thread()
        board = self._board
        if board is None:
            raise GroupCrashError("the ranks are not started", {})
        deadline = time.monotonic() + self._times.validate_s
        try:
            wire = [asdict(request) for request in requests]
            self._ranks[0].send(protocol.VALIDATE, token=token, requests=wire)
            while (refused := board.take_refused(token)) is None:
                is_late = time.monotonic() > deadline
                limit = f"rank 0 has not validated within {self._times.validate_s:g} s"
                self._raise_if_failed(board, stall=limit if is_late else None)
                board.wait(POLL_S)
        except (GroupCrashError, ProtocolError) as error:
            raise self._bury(board, error) from error
        return refused

    def run(
        self,
        requests: Sequence[RenderRequest],
        token: str,
        *,
        on_progress: Callable[[WorkReport], None],
        stop: Callable[[], Stop],
        members: Members = _NO_MEMBERS,
    ) -> dict[str, Outcome]:
        """Render the requests on all ranks and return one outcome per request id.

        `on_progress` and `stop` are called in this thread. Ranks that were killed to stop them, or that ran
        out of memory, are gone afterwards: see `is_ready`.

        Raises:
            GroupCrashError: A rank failed; all are gone.
            GroupStuckError: Ranks could not be killed.
        """
        self._claim_thread()
        board = self._board
        if board is None:
            raise GroupCrashError("the ranks are not started", {})
        run = Run(token, [request.request_id for request in requests], self._owners(requests))
        board.begin(run)
        try:
            self._send_all(protocol.RUN, token=token, requests=[asdict(request) for request in requests])
            outcomes = self._supervise(board, run, on_progress, stop, members)
        except (GroupCrashError, ProtocolError) as error:
            raise self._bury(board, error) from error
        except BaseException:
            # The caller's own failure: ranks that still work on this run must not be sent the next.
            self.kill()
            raise
        finally:
            board.end()
        if any(isinstance(outcome, OutOfMemory) for outcome in outcomes.values()):
            self.kill()
        return {name: outcomes[name] for name in run.request_ids}

    def stall(self) -> str | None:
        """Say which rank of a run shows no progress for longer than its phase allows, if one does."""
        board = self._board
        if board is None or not board.is_running():
            return None
        return board.stall(self._times.stall, on_cpu=self._on_cpu)

    def kill(self) -> None:
        """Kill all ranks (SIGTERM, then SIGKILL) and see that nothing of them is left.

        Raises:
            GroupStuckError: A process survives.
        """
        ranks, self._ranks, self._board = self._ranks, [], None
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        self._wait_for_ends(ranks)
        stuck = [rank.pid for rank in ranks if not rank.reap(self._times.kill_s)]
        if stuck:
            raise GroupStuckError(f"processes {stuck} could not be killed")

    def close(self) -> None:
        """Let the ranks free their devices, then make sure that they are gone.

        Raises:
            GroupStuckError: A process survives.
        """
        try:
            self._send_all(protocol.EXIT)
            self._wait_for_ends(self._ranks)
        except ProtocolError:  # one is gone already; the others need no farewell
            pass
        finally:
            self.kill()

    @property
    def _on_cpu(self) -> bool:
        return not self.spec.devices

    def _claim_thread(self) -> None:
        """Bind the group to its supervisor thread: ranks die with the thread that started them."""
        self._owner = self._owner or threading.get_ident()
        if self._owner != threading.get_ident():
            raise RuntimeError("a group has one supervisor thread: ranks die with their starter")

    def _spawn(self, board: RankBoard) -> None:
        spec, port = self.spec, free_port()
        for index in range(spec.world):
            environment = rank_environment(
                spec.environment,
                rank=index,
                devices=spec.devices,
                world=spec.world,
                port=port,
                deterministic=spec.deterministic,
            )
            rank = RankProcess(RankSpec(index, environment, spec.log_dir / f"rank{index}.log"), board.take)
            self._ranks.append(rank)
            load = LoadSpec(
                profile=spec.profile,
                rank=index,
                world=spec.world,
                devices=spec.devices,
                ckpt_root=spec.ckpt_root,
                deterministic=spec.deterministic,
                master_port=port,
                layout=dict(spec.layout),
            )
            rank.send(protocol.LOAD, engine=spec.engine, spec=asdict(load))

    def _send_all(self, kind: str, **members: Any) -> None:
        for rank in self._ranks:
            rank.send(kind, **members)

    def _supervise(
        self,
        board: RankBoard,
        run: Run,
        on_progress: Callable[[WorkReport], None],
        stop: Callable[[], Stop],
        members: Members,
    ) -> dict[str, Outcome]:
        patience = _Patience()
        called_off: frozenset[str] = frozenset()
        while True:
            news, outcomes, is_over = board.look(run)
            for report in news:
                on_progress(report)
            for request_id in sorted(board.take_dropped(run)):
                members.on_dropped(request_id)
            if outcomes is not None and is_over:
                return outcomes
            if outcomes is None:
                self._raise_if_failed(board)
                called_off = self._call_off(run, called_off, members.called_off())
                if not self._obey(stop(), run, patience):
                    self.kill()
                    return dict.fromkeys(run.request_ids, Stopped("the ranks were killed"))
            if self._is_too_late(run, patience):
                if outcomes is None and run.is_wave:
                    raise GroupCrashError(f"a rank failed and the others did not follow: {run.fault}", {})
                self.kill()
                return outcomes or dict.fromkeys(run.request_ids, run.fault or Stopped())
            board.wait(POLL_S)

    def _owners(self, requests: Sequence[RenderRequest]) -> dict[str, int]:
        world, num_slots = self.spec.world, self.spec.num_slots
        return {request.request_id: output_rank(request.slot, world, num_slots) for request in requests}

    def _call_off(self, run: Run, before: frozenset[str], wanted: frozenset[str]) -> frozenset[str]:
        """Tell rank 0 which requests of a wave are no longer wanted; the engine decides at which step."""
        if wanted - before:
            self._ranks[0].send(protocol.CANCEL, token=run.token, request_ids=sorted(wanted))
        return before | wanted

    def _obey(self, order: Stop, run: Run, patience: _Patience) -> bool:
        """Pass a stop on to rank 0, which decides at which step; False when the ranks must be killed."""
        if order is Stop.GO_ON:
            return True
        if order is Stop.NOW:
            return False
        now = time.monotonic()
        if patience.cancel_until is None:
            median_step_s = self._board.median_step_s if self._board else 0.0
            patience.cancel_until = now + max(
                self._times.cancel_grace_s, self._times.cancel_steps * median_step_s
            )
            self._ranks[0].send(protocol.CANCEL, token=run.token)
        return now < patience.cancel_until

    def _is_too_late(self, run: Run, patience: _Patience) -> bool:
        """Tell whether some ranks have ended the run and others have not followed in time."""
        if run.outcomes is None and run.fault is None:
            return False
        now = time.monotonic()
        patience.late_until = patience.late_until or now + self._times.late_rank_s
        return now > patience.late_until

    @staticmethod
    def _raise_if_failed(board: RankBoard, stall: str | None = None) -> None:
        crash = board.crash
        if crash is not None:
            raise GroupCrashError(f"rank {crash.rank}: {crash.message}", crash.details)
        if stall is not None:
            raise GroupCrashError(stall, {})

    def _bury(self, board: RankBoard, error: GroupCrashError | ProtocolError | OSError) -> GroupCrashError:
        """Collect the evidence, kill what is left of the group, and return the error to raise."""
        message, evidence = str(error), dict(getattr(error, "evidence", {}))
        # A pipe that nobody reads any more is noticed before the end of the process is.
        if isinstance(error, ProtocolError):
            board.wait_for_crashes(1, CRASH_NEWS_S)
        cause = self._first_cause(board)
        if cause is not None:
            crash, exit_code = cause
            evidence = {**crash.details, "exit_code": exit_code}
            message = f"rank {crash.rank}: {crash.message} (exit code {exit_code})"
        ranks = list(self._ranks)
        self.kill()
        evidence["log"] = {str(rank.spec.rank): rank.tail() for rank in ranks}
        return GroupCrashError(message, evidence)

    def _first_cause(self, board: RankBoard) -> tuple[Crash, int | None] | None:
        """Name the rank whose failure came first, and its exit status; others get a moment to be heard."""
        first = board.crash
        if first is None:
            return None
        if self._exit_code(self._ranks[first.rank]) == protocol.CRASH_EXIT_CODE:
            board.wait_for_crashes(len(self._ranks), CRASH_NEWS_S)
        crashes = board.wait_for_crashes(1, 0)
        failures = {crash: self._exit_code(self._ranks[crash.rank]) for crash in crashes}
        cause = first_cause(failures)
        return cause, failures[cause]

    def _exit_code(self, rank: RankProcess) -> int | None:
        """Return the status of a rank whose pipe has ended; its end follows within moments."""
        self._wait_for_ends([rank], timeout_s=CRASH_NEWS_S)
        return rank.returncode

    def _wait_for_ends(self, ranks: Sequence[RankProcess], timeout_s: float | None = None) -> None:
        deadline = time.monotonic() + (self._times.term_s if timeout_s is None else timeout_s)
        while any(rank.returncode is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
