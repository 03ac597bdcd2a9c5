"""The heartbeat: one thread with its own database connection that keeps group and leases alive.

It beats for jobs only while the ranks are provably alive, so a frozen rank under a healthy agent loses
its lease. A `Lease` is what the agent knows of its claim: it counts as held until shortly before its end
by a local monotonic clock that starts when the last accepted beat was sent, whatever happens to the
database or to this thread meanwhile. Nothing here stops ranks or ends jobs: the agent asks, and acts.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from farm import groups
from farm.clock import monotonic_s
from farm.db.session import unit_of_work
from farm.errors import NotFoundError
from farm.groups import Group
from farm.jobs import lifecycle
from farm.jobs.job import Beat, Claimed, Rules
from farm.jobs.phases import Progress
from farm.metrics.moves import count_fenced

log = structlog.get_logger(__name__)

SAFETY_S = 5.0
SAFETY_SHARE = 6.0
RETRY_S = 1.0
STOP_S = 10.0


class Lease:
    """The agent's hold on one job, shared by the agent loop and the heartbeat thread."""

    def __init__(self, claimed: Claimed, sent_at: float, clock: Callable[[], float] = monotonic_s) -> None:
        """Start the local clock at the moment when the claim was sent."""
        self.job_id = claimed.job.id
        self.epoch = claimed.epoch
        self.progress: Progress | None = None
        self.cancel_requested = False
        self.deadline_passed = False
        self.is_stalled = False
        self._clock = clock
        self._lost = ""
        self._until = 0.0
        self._extend(sent_at, claimed.lease_s)

    @property
    def lost(self) -> str:
        """Say why the job is no longer ours; empty while it is."""
        if not self._lost and self._clock() >= self._until:
            self.lose("no heartbeat was accepted in time")
        return self._lost

    def lose(self, reason: str) -> None:
        """Give up for good; the first reason stays."""
        self._lost = self._lost or reason

    def renew(self, sent_at: float, answer: Beat) -> None:
        """Take in an accepted beat."""
        self._extend(sent_at, answer.lease_s)
        self.cancel_requested = self.cancel_requested or answer.cancel_requested
        self.deadline_passed = self.deadline_passed or answer.deadline_passed

    def _extend(self, sent_at: float, lease_s: float) -> None:
        # Stop before the database lets go; a short lease of a test leaves less room.
        self._until = sent_at + lease_s - min(SAFETY_S, lease_s / SAFETY_SHARE)


@dataclass
class _GroupNews:
    state: str = "booting"
    fingerprint: dict[str, Any] | None = None


class Heartbeat:
    """The thread."""

    def __init__(
        self,
        engine: Engine,
        group: Group,
        *,
        interval_s: float,
        rules: Rules,
        stall: Callable[[], str | None],
        on_wanted: Callable[[str | None], None],
        stats: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Prepare the thread.

        Args:
            engine: A pool that nothing else uses.
            group: The row to keep alive.
            interval_s: Between beats.
            rules: Of the farm.
            stall: Says which rank shows no progress; asked before each beat for a job.
            on_wanted: Told what an operator wants of the group; `gone` when another agent has taken it over.
            stats: What the group's row shall say of devices and use; asked before each beat.
        """
        self._engine = engine
        self._group = group
        self._interval_s = interval_s
        self._rules = rules
        self._stall = stall
        self._on_wanted = on_wanted
        self._stats = stats
        self._leases: tuple[Lease, ...] = ()
        self._news = _GroupNews()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start beating for the group."""
        self._thread.start()

    def stop(self, final_state: str) -> None:
        """Stop beating, and leave a last word on the group's row if the database is there."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._interval_s + STOP_S)
        self.show(final_state)
        try:
            if self._thread.ident is not None:  # else the row is not this agent's
                self._beat_group()
        except SQLAlchemyError as error:
            log.warning("group_not_signed_off", err=type(error).__name__)
        self._engine.dispose()

    def show(self, state: str, fingerprint: dict[str, Any] | None = None) -> None:
        """Change what the group's row says, at once."""
        self._news = _GroupNews(state, fingerprint or self._news.fingerprint)
        self._wake.set()

    def hold(self, *leases: Lease) -> None:
        """Beat for these jobs from now on, and for no others."""
        self._leases = leases

    def let_go(self, lease: Lease) -> None:
        """Beat for this job no more; called by the thread that called `hold`."""
        self._leases = tuple(held for held in self._leases if held is not lease)

    def _beat_forever(self) -> None:
        wait_s = 0.0
        while not self._stopping.is_set():
            self._wake.wait(wait_s)
            self._wake.clear()
            wait_s = self._interval_s if self._beat() else min(RETRY_S, self._interval_s)

    def _beat(self) -> bool:
        """Beat once for each job and once for the group; False if the database did not take it."""
        try:
            stall = self._stall()
            for lease in self._leases:
                self._beat_job(lease, stall)
            self._beat_group()
        except SQLAlchemyError as error:
            log.warning("heartbeat_failed", err=type(error).__name__)
            return False
        return True

    def _beat_job(self, lease: Lease, stall: str | None) -> None:
        if lease.lost:
            return
        if bool(stall) != lease.is_stalled:
            log.warning("ranks_stalled" if stall else "ranks_move_again", job_id=lease.job_id, err=stall)
        lease.is_stalled = bool(stall)
        if stall:
            return
        sent_at = monotonic_s()
        with unit_of_work(self._engine) as conn:
            answer = lifecycle.beat(
                conn, lease.job_id, lease.epoch, self._group.id, lease.progress, rules=self._rules
            )
        if answer is None:
            count_fenced(self._group.profile)
            lease.lose("the database has given the job to somebody else or ended it")
        else:
            lease.renew(sent_at, answer)
            self._on_wanted(answer.wanted_state)

    def _beat_group(self) -> None:
        news, stats = self._news, self._stats()
        try:
            with unit_of_work(self._engine) as conn:
                wanted = groups.heartbeat(
                    conn, self._group.id, self._group.boot_id, news.state, news.fingerprint, stats
                )
        except NotFoundError:
            wanted = "gone"
        self._on_wanted(wanted)
