"""Reads for those who follow jobs live: how jobs stand, and their events since a number or an instant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, text

from farm.clock import db_now, db_seconds
from farm.db.tables import job, job_event
from farm.jobs.job import Event
from farm.jobs.states import ACTIVE, State

# Events commit out of order, by as much as a transaction may take; each is read again for so long.
OVERLAP_S = 6.0
MAX_ACCOUNT_EVENTS = 5_000
MAX_REPLAYED = 1_000
_SINCE = text(
    """
    SELECT e.* FROM job_event e
    JOIN unnest(CAST(:ids AS text[]), CAST(:seqs AS integer[])) AS known(id, seq)
      ON known.id = e.job_id AND e.seq > known.seq
    ORDER BY e.job_id, e.seq
    """
)


@dataclass(frozen=True)
class Standing:
    """Where a job is: the number of its newest event, and its progress."""

    id: str
    state: State
    seq: int
    epoch: int
    phase: str | None
    step: int
    steps: int
    progress: int

    @property
    def is_active(self) -> bool:
        """Tell whether a group holds it."""
        return self.state in ACTIVE

    def report(self) -> dict[str, Any]:
        """Return its progress as agents report it."""
        return {
            "id": self.id,
            "attempt": self.epoch,
            "phase": self.phase,
            "step": self.step,
            "total_steps": self.steps,
            "progress": self.progress,
        }


def standings(conn: Connection, job_ids: Sequence[str]) -> dict[str, Standing]:
    """Return how these jobs stand, also deleted ones; a job that is missing has no row any more."""
    columns = (
        job.c.id,
        job.c.state,
        job.c.seq,
        job.c.epoch,
        job.c.phase,
        job.c.step,
        job.c.steps,
        job.c.progress,
    )
    rows = conn.execute(select(*columns).where(job.c.id.in_(job_ids))).mappings()
    return {row["id"]: Standing(**{**row, "state": State(row["state"])}) for row in rows}


def job_events(conn: Connection, after: Mapping[str, int]) -> dict[str, list[Event]]:
    """Return the events of jobs that come after a number, in order."""
    found: dict[str, list[Event]] = {}
    if after:
        for row in conn.execute(_SINCE, {"ids": list(after), "seqs": list(after.values())}).mappings():
            found.setdefault(row["job_id"], []).append(Event(**row))
    return found


def account_events(conn: Connection, account_ids: Sequence[str]) -> list[tuple[str, Event]]:
    """Return the events of the last seconds of whole accounts, with the account of each."""
    query = (
        select(job.c.account_id, job_event)
        .join(job, job.c.id == job_event.c.job_id)
        .where(job.c.account_id.in_(account_ids), job_event.c.at > db_now() - db_seconds(OVERLAP_S))
        .order_by(job_event.c.at, job_event.c.job_id, job_event.c.seq)
        .limit(MAX_ACCOUNT_EVENTS)
    )
    rows = [dict(row) for row in conn.execute(query).mappings()]
    return [(row.pop("account_id"), Event(**row)) for row in rows]


def account_events_after(conn: Connection, account_id: str, job_id: str, seq: int) -> list[Event]:
    """Return what an account's stream missed after one event; empty if that event is unknown."""
    known = (
        select(job_event.c.at)
        .join(job, job.c.id == job_event.c.job_id)
        .where(job.c.account_id == account_id, job_event.c.job_id == job_id, job_event.c.seq == seq)
        .scalar_subquery()
    )
    query = (
        select(job_event)
        .join(job, job.c.id == job_event.c.job_id)
        .where(job.c.account_id == account_id, job_event.c.at > known)
        .order_by(job_event.c.at, job_event.c.job_id, job_event.c.seq)
        .limit(MAX_REPLAYED)
    )
    return [Event(**row) for row in conn.execute(query).mappings()]
