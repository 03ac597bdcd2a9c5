"""Quarantine: jobs that are not started again until an operator releases them.

The failure policy puts poison in (`farm/jobs/lifecycle.py`), an operator anything (`quarantine_job` of
`farm/jobs/control.py`). A job in quarantine has ended or is being stopped; its owner's `retry` is refused.
Releasing starts nothing: it allows a retry again. Rows stay, so that what was released can be looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Select, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from farm.clock import db_now
from farm.db.tables import job, quarantine
from farm.errors import NotFoundError


class Reason(StrEnum):
    """Why a job is kept."""

    POISON = "poison"  # its attempts crashed their workers
    OPERATOR = "operator"


@dataclass(frozen=True)
class Quarantined:
    """A job in quarantine, or one that was; `evidence` is for operators only."""

    job_id: str
    epoch: int
    reason: str
    evidence: dict[str, Any]
    at: datetime
    put_by: str | None
    released_at: datetime | None
    released_by: str | None
    account_id: str
    profile: str
    state: str


def list_quarantine(
    conn: Connection, *, with_released: bool = False, after: Quarantined | None = None, limit: int = 100
) -> list[Quarantined]:
    """Return the jobs in quarantine, newest first, from after the last one of the page before."""
    query = _query()
    if not with_released:
        query = query.where(quarantine.c.released_at.is_(None))
    if after is not None:
        position = tuple_(quarantine.c.at, quarantine.c.job_id, quarantine.c.epoch)
        query = query.where(position < tuple_(after.at, after.job_id, after.epoch))
    newest_first = (quarantine.c.at.desc(), quarantine.c.job_id.desc(), quarantine.c.epoch.desc())
    return [Quarantined(**row) for row in conn.execute(query.order_by(*newest_first).limit(limit)).mappings()]


def get_quarantine(conn: Connection, job_id: str) -> Quarantined | None:
    """Return the newest entry of a job, released or not; None if it was never in quarantine."""
    newest = _query().where(quarantine.c.job_id == job_id).order_by(quarantine.c.epoch.desc()).limit(1)
    row = conn.execute(newest).mappings().one_or_none()
    return None if row is None else Quarantined(**row)


def is_quarantined(conn: Connection, job_id: str) -> bool:
    """Tell whether a job may not be started again."""
    held = select(quarantine.c.job_id).where(
        quarantine.c.job_id == job_id, quarantine.c.released_at.is_(None)
    )
    return conn.execute(held.limit(1)).first() is not None


def put(
    conn: Connection,
    job_id: str,
    epoch: int,
    reason: Reason,
    evidence: Mapping[str, Any],
    *,
    by: str | None = None,
) -> None:
    """Keep a job whose row the caller has locked; what was released before is kept anew."""
    values = {"reason": reason, "evidence": dict(evidence), "at": db_now(), "put_by": by}
    row = insert(quarantine).values(job_id=job_id, epoch=epoch, **values)
    again = {**values, "released_at": None, "released_by": None}
    conn.execute(row.on_conflict_do_update(index_elements=["job_id", "epoch"], set_=again))


def release(conn: Connection, job_id: str, by: str) -> None:
    """Let a job be retried again.

    Raises:
        NotFoundError: It is not in quarantine.
    """
    held = (quarantine.c.job_id == job_id) & quarantine.c.released_at.is_(None)
    freed = update(quarantine).where(held).values(released_at=db_now(), released_by=by)
    if not conn.execute(freed).rowcount:
        raise NotFoundError(f"{job_id} in quarantine")


def _query() -> Select[Any]:
    return select(quarantine, job.c.account_id, job.c.profile, job.c.state).join(
        job, job.c.id == quarantine.c.job_id
    )
