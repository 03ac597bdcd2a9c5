"""The two clocks of the farm.

Decisions about jobs (leases, deadlines, order) are made with the database's clock, `db_now`, inside the
statement that acts on them. The process clock is for what is only shown or measured: ids, log lines,
durations. Nothing here sleeps.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, DateTime, Interval, func


def now() -> datetime:
    """Return this process's idea of now, aware and in UTC; never used to decide about a job."""
    return datetime.now(UTC)


def monotonic_s() -> float:
    """Return seconds of a clock that never steps, for durations and local waiting."""
    return time.monotonic()


def db_now() -> ColumnElement[datetime]:
    """Return the database's clock at the moment of the statement, not of the transaction's start.

    A transaction may have waited for a row lock; its events must not look older than what it waited for.
    """
    return func.clock_timestamp(type_=DateTime(timezone=True))


def db_seconds(seconds: float | ColumnElement[Any]) -> ColumnElement[timedelta]:
    """Return a number of seconds, given or of a column, as an interval."""
    return func.make_interval(0, 0, 0, 0, 0, 0, seconds, type_=Interval())


def db_after(seconds: float | ColumnElement[Any]) -> ColumnElement[datetime]:
    """Return the database's clock plus a number of seconds."""
    return db_now() + db_seconds(seconds)
