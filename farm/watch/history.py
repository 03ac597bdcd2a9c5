"""How the farm was: one small row a minute, kept for two days, and the last day of them by hour.

What can be counted afterwards (endings, waits, webhook attempts) is not kept here. A row is named by its
minute, so any number of tickers write one, and an hour without any ticker shows as a gap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from farm.groups import FRESH_S
from farm.jobs.states import State

HOURS = 24
KEPT_HOURS = 48
_TAKE = text(
    """
    INSERT INTO farm_sample (at, queued, groups_up, groups_busy, outbox_lag_s)
    SELECT date_trunc('minute', now()),
           (SELECT count(*) FROM job WHERE state = :queued),
           count(*),
           count(*) FILTER (WHERE state = 'busy'),
           (SELECT coalesce(extract(epoch FROM now() - min(created_at)), 0) FROM outbox WHERE sent_at IS NULL)
    FROM worker_group
    WHERE state <> 'gone' AND heartbeat_at > now() - make_interval(secs => :fresh_s)
    ON CONFLICT (at) DO NOTHING
    """
)
_FORGET = text("DELETE FROM farm_sample WHERE at < now() - make_interval(hours => :hours)")
_READ = text(
    """
    SELECT greatest(0, least(:hours - 1, floor(extract(epoch FROM now() - at) / 3600)))::int AS hours_ago,
           max(queued) AS queued, min(groups_up) AS groups_up, max(groups_busy) AS groups_busy,
           max(outbox_lag_s) AS outbox_lag_s
    FROM farm_sample WHERE at > now() - make_interval(hours => :hours)
    GROUP BY 1
    """
)


@dataclass(frozen=True)
class History:
    """The last 24 hours, oldest first, each by its worst minute; None where nobody wrote anything."""

    queued: list[float | None]
    groups_up: list[float | None]
    groups_busy: list[float | None]
    outbox_lag_s: list[float | None]


def take_sample(conn: Connection) -> int:
    """Write the row of this minute, if nobody has, and remove old ones; return how many rows changed."""
    taken = conn.execute(_TAKE, {"queued": State.QUEUED, "fresh_s": FRESH_S}).rowcount
    return taken + conn.execute(_FORGET, {"hours": KEPT_HOURS}).rowcount


def history(conn: Connection) -> History:
    """Read the last day: at most one row a minute, from the end of the primary key."""
    rows = conn.execute(_READ, {"hours": HOURS}).mappings().all()
    by_hour = {HOURS - 1 - row["hours_ago"]: row for row in rows}
    return History(
        queued=_series(by_hour, "queued"),
        groups_up=_series(by_hour, "groups_up"),
        groups_busy=_series(by_hour, "groups_busy"),
        outbox_lag_s=_series(by_hour, "outbox_lag_s"),
    )


def _series(by_hour: Mapping[int, Mapping[Any, Any]], name: str) -> list[float | None]:
    return [by_hour[hour][name] if hour in by_hour else None for hour in range(HOURS)]
