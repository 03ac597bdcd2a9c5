"""Guesses that a waiting user wants: the place in the queue, and the seconds until the end.

Both are computed when read, from what is queued and what the profile's last clips took; nothing is decided by
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import Connection, Float, Select, bindparam, extract, func, select, tuple_

from farm.clock import db_now, db_seconds, monotonic_s
from farm.db.tables import job, job_attempt, worker_group
from farm.groups import FRESH_S
from farm.jobs.job import Job
from farm.jobs.states import ACTIVE, State

MAX_POSITION = 1_000  # nobody needs to know more exactly, and each place costs a row
NUM_SAMPLES = 20
KEEP_S = 3.0  # a poll storm asks for the same numbers again and again


@dataclass(frozen=True)
class Pace:
    """What the newest clips of a profile and tier took, as medians."""

    step_s: float
    rest_s: float

    def clip_s(self, steps: int) -> float:
        """Return the seconds of one whole attempt with so many steps."""
        return self.rest_s + steps * self.step_s


@dataclass(frozen=True)
class Queue:
    """Groups and waiting jobs of a profile."""

    live_groups: int = 0
    idle_groups: int = 0
    queued: int = 0
    oldest_s: float | None = None


def queues(conn: Connection) -> dict[str, Queue]:
    """Return the profiles that have live groups or waiting jobs."""
    is_live = (worker_group.c.state != "gone") & (
        worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S)
    )
    groups = (
        select(
            worker_group.c.profile,
            func.count(),
            func.count().filter(worker_group.c.state == "ready"),
        )
        .where(is_live)
        .group_by(worker_group.c.profile)
    )
    age_s = extract("epoch", db_now() - func.min(job.c.queued_at)).cast(Float)
    waiting = (
        select(job.c.profile, func.count(), age_s).where(job.c.state == State.QUEUED).group_by(job.c.profile)
    )
    live = {row[0]: (row[1], row[2]) for row in conn.execute(groups)}
    queued = {row[0]: (row[1], row[2]) for row in conn.execute(waiting)}
    return {
        profile: Queue(*live.get(profile, (0, 0)), *queued.get(profile, (0, None)))
        for profile in live.keys() | queued.keys()
    }


def queue_position(conn: Connection, wanted: Job) -> int | None:
    """Return an estimate of the place in the queue of its profile, 1 = next; None when not queued."""
    if wanted.state is not State.QUEUED:
        return None
    asked = {"profile": wanted.profile, "rank_at": wanted.rank_at, "id": wanted.id}
    return 1 + conn.execute(_NUM_AHEAD, asked).scalar_one()


def _num_ahead() -> Select[int]:
    """Build the statement of every submit and poll once."""
    here = tuple_(bindparam("rank_at", type_=job.c.rank_at.type), bindparam("id", type_=job.c.id.type))
    ahead = (
        select(job.c.id)
        .where(job.c.state == State.QUEUED, job.c.profile == bindparam("profile"))
        .where(tuple_(job.c.rank_at, job.c.id) < here)
        .limit(MAX_POSITION)
        .subquery()
    )
    return select(func.count()).select_from(ahead)


_NUM_AHEAD = _num_ahead()


def queue_positions(conn: Connection, job_ids: Sequence[str]) -> dict[str, int]:
    """Return `queue_position` of those of these jobs that are queued, for pages: one query for all."""
    mine = job.alias("mine")
    ahead = (
        select(job.c.id)
        .where(job.c.state == State.QUEUED, job.c.profile == mine.c.profile)
        .where(tuple_(job.c.rank_at, job.c.id) < tuple_(mine.c.rank_at, mine.c.id))
        .limit(MAX_POSITION)
        .correlate(mine)
        .subquery()
    )
    num_ahead = select(func.count()).select_from(ahead).scalar_subquery()
    wanted = select(mine.c.id, 1 + num_ahead).where(mine.c.state == State.QUEUED, mine.c.id.in_(job_ids))
    return {row[0]: row[1] for row in conn.execute(wanted)}


def eta_s(conn: Connection, wanted: Job) -> float | None:
    """Return the seconds until the end; None at the end, and before the profile has finished a clip."""
    return Estimator(keep_s=0).estimate(conn, wanted).eta_s


@dataclass(frozen=True)
class Estimate:
    """What a user wants to know of a job that has not ended."""

    queue_position: int | None = None
    eta_s: float | None = None


class Estimator:
    """Makes estimates, and remembers for a few seconds what a profile's clips took and how busy it is."""

    def __init__(self, *, keep_s: float = KEEP_S, clock: Callable[[], float] = monotonic_s) -> None:
        """Start without knowledge."""
        self._keep_s = keep_s
        self._clock = clock
        self._paces: dict[tuple[str, str], tuple[float, Pace | None]] = {}
        self._loads: dict[str, tuple[float, tuple[int, int]]] = {}

    def estimate(self, conn: Connection, wanted: Job) -> Estimate:
        """Return the place in the queue and the seconds until the end, each None where there is none."""
        if wanted.is_finished:
            return Estimate()
        position = queue_position(conn, wanted)
        clip_s = self.clip_s(conn, wanted.profile, str(wanted.params["tier"]), wanted.steps)
        if clip_s is None:
            return Estimate(position)
        if wanted.is_active:
            return Estimate(position, clip_s * (100 - wanted.progress) / 100)
        return Estimate(position, clip_s + self.wait_s(conn, wanted.profile, position or 1, clip_s))

    def clip_s(self, conn: Connection, profile: str, tier: str, steps: int) -> float | None:
        """Return what one clip takes; None before the profile has finished one of this tier."""
        until_s, pace = self._paces.get((profile, tier), (0.0, None))
        if until_s <= self._clock():
            pace = measure_pace(conn, profile, tier)
            self._paces[profile, tier] = (self._clock() + self._keep_s, pace)
        return None if pace is None else pace.clip_s(steps)

    def wait_s(self, conn: Connection, profile: str, position: int, clip_s: float) -> float:
        """Return how long a job at this place of the queue waits, if all clips take as long as this one."""
        until_s, load = self._loads.get(profile, (0.0, (0, 0)))
        if until_s <= self._clock():
            load = _load(conn, profile)
            self._loads[profile] = (self._clock() + self._keep_s, load)
        num_groups, num_active = load
        if position <= num_groups - num_active:
            return 0.0
        # Those that run are half done on average.
        return clip_s * (position - 1 + num_active / 2) / max(num_groups, 1)


def measure_pace(conn: Connection, profile: str, tier: str) -> Pace | None:
    """Return what the last clips of this profile and tier took; None before the first."""
    whole_s = extract("epoch", job_attempt.c.ended_at - job_attempt.c.started_at).cast(Float)
    denoise_s = func.coalesce(job.c.result["stage_durations"]["denoise"].as_float(), whole_s)
    query = (
        select(job.c.steps, whole_s, denoise_s)
        .join(job_attempt, (job_attempt.c.job_id == job.c.id) & (job_attempt.c.epoch == job.c.epoch))
        .where(job.c.state == State.SUCCEEDED, job.c.profile == profile)
        .where(job.c.params["tier"].as_string() == tier)
        .order_by(job.c.finished_at.desc())
        .limit(NUM_SAMPLES)
    )
    rows = conn.execute(query).all()
    if not rows:
        return None
    return Pace(
        step_s=median(denoise / steps for steps, _, denoise in rows),
        rest_s=median(max(0.0, whole - denoise) for _, whole, denoise in rows),
    )


def _load(conn: Connection, profile: str) -> tuple[int, int]:
    """Return how many groups serve a profile, and how many jobs they hold."""
    groups = (
        select(func.count())
        .select_from(worker_group)
        .where(worker_group.c.profile == profile, worker_group.c.state != "gone")
        .where(worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S))
    )
    active = select(func.count()).select_from(job).where(job.c.state.in_(ACTIVE), job.c.profile == profile)
    row = conn.execute(select(groups.scalar_subquery(), active.scalar_subquery())).one()
    return row[0], row[1]
