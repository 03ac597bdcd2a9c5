"""The farm at a glance: queues, groups, endings by hour, webhooks and outbox.

Every number comes from an index that stays small or is bounded by the last 24 hours, so the page costs about
the same with a million finished jobs as with none. Waiting and active jobs are read from partial indexes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Float, extract, func, literal_column, select, text

from farm.clock import db_now, db_seconds
from farm.db.tables import job, outbox, webhook_attempt, webhook_delivery, webhook_endpoint, worker_group
from farm.groups import FRESH_S
from farm.jobs.states import ACTIVE, State
from farm.watch.history import HOURS, History, history

_ENDINGS = text(
    """
    SELECT greatest(0, least(:hours - 1,
               floor(extract(epoch FROM now() - finished_at) / 3600)))::int AS hours_ago,
           profile, state, count(*) AS num,
           avg(extract(epoch FROM started_at - queued_at))::float AS wait_s
    FROM job WHERE finished_at > now() - make_interval(hours => :hours)
    GROUP BY 1, 2, 3
    """
)


@dataclass
class Hour:
    """What ended within one hour."""

    succeeded: int = 0
    failed: int = 0
    other: int = 0  # canceled or expired: nobody's fault
    wait_s: float | None = None  # between being queued and started, on average

    @property
    def failure_rate(self) -> float | None:
        """Return the share of failures among what the farm tried to the end; None without any."""
        tried = self.succeeded + self.failed
        return self.failed / tried if tried else None


@dataclass
class ProfileNow:
    """How one profile is doing; `hours` are the last 24, oldest first."""

    name: str
    queued: int = 0
    active: int = 0
    oldest_s: float | None = None
    groups_up: int = 0
    groups_busy: int = 0
    hours: list[Hour] = field(default_factory=lambda: [Hour() for _ in range(HOURS)])

    @property
    def finished_last_hour(self) -> int:
        """Return how many clips it made within the last hour."""
        return self.hours[-1].succeeded


@dataclass(frozen=True)
class Overview:
    """Everything of the first page."""

    at: datetime
    profiles: list[ProfileNow]
    hours: list[Hour]
    failure_rate_1h: float | None
    failure_rate_24h: float | None
    dead_webhooks: int
    waiting_webhooks: int
    disabled_endpoints: int
    webhook_failures: list[int]
    outbox_unsent: int
    outbox_oldest_s: float | None
    sick_groups: int
    history: History


def overview(conn: Connection, known: Iterable[str] = ()) -> Overview:
    """Read it all; profiles that are neither known, served nor used are left out."""
    profiles = {name: ProfileNow(name) for name in known}
    _read_jobs(conn, profiles)
    sick = _read_groups(conn, profiles)
    hours = _read_endings(conn, profiles)
    day = Hour(sum(hour.succeeded for hour in hours), sum(hour.failed for hour in hours))
    at, unsent, oldest_s = conn.execute(_outbox()).one()
    waiting, dead = _deliveries(conn)
    return Overview(
        at=at,
        profiles=sorted(profiles.values(), key=lambda profile: profile.name),
        hours=hours,
        failure_rate_1h=hours[-1].failure_rate,
        failure_rate_24h=day.failure_rate,
        dead_webhooks=dead,
        waiting_webhooks=waiting,
        disabled_endpoints=_disabled(conn),
        webhook_failures=_webhook_failures(conn),
        outbox_unsent=unsent,
        outbox_oldest_s=oldest_s,
        sick_groups=sick,
        history=history(conn),
    )


def _read_jobs(conn: Connection, profiles: dict[str, ProfileNow]) -> None:
    age_s = extract("epoch", db_now() - func.min(job.c.queued_at)).cast(Float)
    waiting = select(job.c.profile, func.count(), age_s).where(job.c.state == State.QUEUED)
    for name, num, oldest_s in conn.execute(waiting.group_by(job.c.profile)).all():
        found = profiles.setdefault(name, ProfileNow(name))
        found.queued, found.oldest_s = num, oldest_s
    active = select(job.c.profile, func.count()).where(job.c.state.in_(ACTIVE)).group_by(job.c.profile)
    for name, num in conn.execute(active).all():
        profiles.setdefault(name, ProfileNow(name)).active = num


def _read_groups(conn: Connection, profiles: dict[str, ProfileNow]) -> int:
    """Count live groups by profile; return how many of them are sick."""
    is_live = (worker_group.c.state != "gone") & (
        worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S)
    )
    query = select(
        worker_group.c.profile,
        func.count(),
        func.count().filter(worker_group.c.state == "busy"),
        func.count().filter(worker_group.c.state == "sick"),
    ).where(is_live)
    num_sick = 0
    for name, num, busy, sick in conn.execute(query.group_by(worker_group.c.profile)).all():
        found = profiles.setdefault(name, ProfileNow(name))
        found.groups_up, found.groups_busy = num, busy
        num_sick += sick
    return num_sick


def _read_endings(conn: Connection, profiles: dict[str, ProfileNow]) -> list[Hour]:
    """Fill the hours of each profile and return those of all together."""
    waits: dict[int, list[tuple[int, float]]] = defaultdict(list)
    whole = [Hour() for _ in range(HOURS)]
    for row in conn.execute(_ENDINGS, {"hours": HOURS}).mappings():
        index = HOURS - 1 - row["hours_ago"]
        for hour in (
            profiles.setdefault(row["profile"], ProfileNow(row["profile"])).hours[index],
            whole[index],
        ):
            _add(hour, row)
        if row["wait_s"] is not None:
            waits[index].append((row["num"], row["wait_s"]))
    for index, parts in waits.items():
        whole[index].wait_s = sum(num * wait for num, wait in parts) / sum(num for num, _ in parts)
    return whole


def _add(hour: Hour, row: Mapping[Any, Any]) -> None:
    if row["state"] == State.SUCCEEDED:
        hour.succeeded += row["num"]
    elif row["state"] == State.FAILED:
        hour.failed += row["num"]
    else:
        hour.other += row["num"]


def _outbox() -> Any:
    oldest_s = extract("epoch", db_now() - func.min(outbox.c.created_at)).cast(Float)
    return select(db_now(), func.count(), oldest_s).select_from(outbox).where(outbox.c.sent_at.is_(None))


def _deliveries(conn: Connection) -> tuple[int, int]:
    """Return how many deliveries wait, and how many are dead."""
    # One count per status, so that each finds its partial index; sent ones are never read.
    counts = [
        select(func.count()).where(webhook_delivery.c.status == literal_column(f"'{status}'"))
        for status in ("pending", "leased", "dead")
    ]
    pending, leased, dead = conn.execute(select(*(count.scalar_subquery() for count in counts))).one()
    return pending + leased, dead


def _disabled(conn: Connection) -> int:
    """Count endpoints that the farm turned off by itself."""
    query = select(func.count()).where(
        webhook_endpoint.c.enabled.is_(False),
        webhook_endpoint.c.deleted_at.is_(None),
        webhook_endpoint.c.failing_since.is_not(None),
    )
    return int(conn.execute(query).scalar_one())


def _webhook_failures(conn: Connection) -> list[int]:
    hours_ago = func.floor(extract("epoch", func.now() - webhook_attempt.c.at) / 3600)
    is_bad = webhook_attempt.c.http_status.is_(None) | (webhook_attempt.c.http_status >= 300)
    query = (
        select(hours_ago.cast(Float), func.count())
        .where(webhook_attempt.c.at > func.now() - timedelta(hours=HOURS), is_bad)
        .group_by(hours_ago)
    )
    found = [0] * HOURS
    for past, num in conn.execute(query).all():
        found[HOURS - 1 - min(max(int(past), 0), HOURS - 1)] += num
    return found
