"""Engines and the unit of work. This module is the only one that commits.

A unit of work is short: no network call but the database's happens inside it. Every connection has the
time-outs of its role set by the server, so a forgotten lock or a slow query ends by itself.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from farm.settings import Settings

STATEMENT_TIMEOUT_S = 5
SWEEP_STATEMENT_TIMEOUT_S = 15
LOCK_TIMEOUT_S = 2
IDLE_IN_TRANSACTION_TIMEOUT_S = 10
CONNECT_TIMEOUT_S = 5
PING_AFTER_S = 2.0
_USED_S = "used_s"
_AFTER_COMMIT = "after_commit"


def make_engine(settings: Settings, *, application: str, pool_size: int = 5) -> Engine:
    """Return a pool of connections for threads.

    Args:
        settings: Names the database.
        application: Role shown in pg_stat_activity; `ticker` may run the longer statements of sweeps.
        pool_size: Connections kept; as many again may be opened for a moment.
    """
    # A restarted server must not fail the first use of every connection.
    options = _options(application, pool_size) | {"pool_pre_ping": True}
    return create_engine(settings.database_url, **options)


def make_async_engine(settings: Settings, *, application: str, pool_size: int = 10) -> AsyncEngine:
    """Return a pool of connections for an event loop; arguments as for `make_engine`.

    Only a connection that was idle for a moment is asked whether it still works: asking each time would cost
    every request a round trip. After a restart of the server, the first request of a busy process may fail.
    """
    engine = create_async_engine(settings.database_url, **_options(application, pool_size))
    _ping_idle_connections(engine.sync_engine)
    return engine


@contextmanager
def unit_of_work(engine: Engine) -> Iterator[Connection]:
    """Give a connection in a transaction; commit at the end, roll back on any exception."""
    with engine.begin() as conn:
        acts = _open_ledger(conn.info)
        yield conn
    for act in acts:
        act()


@asynccontextmanager
async def async_unit_of_work(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Give a connection in a transaction; commit at the end, roll back on any exception or cancellation."""
    async with engine.begin() as conn:
        acts = _open_ledger(conn.info)
        yield conn
    for act in acts:
        act()


def after_commit(conn: Connection, act: Callable[[], None]) -> None:
    """Do something once the transaction has committed, and not if it rolls back.

    For what only this process sees, such as counting; it must be quick and must not fail.
    """
    conn.info.setdefault(_AFTER_COMMIT, []).append(act)


def _open_ledger(info: dict[Any, Any]) -> list[Callable[[], None]]:
    """Start the list of a transaction; a pooled connection may still carry that of another."""
    acts: list[Callable[[], None]] = []
    info[_AFTER_COMMIT] = acts
    return acts


def _ping_idle_connections(engine: Engine) -> None:
    """Ask idle connections whether they still work before they are used; the pool replaces dead ones."""

    def note_use(_: Any, record: ConnectionPoolEntry) -> None:
        record.info[_USED_S] = time.monotonic()

    def ping(connection: DBAPIConnection, record: ConnectionPoolEntry, _: Any) -> None:
        used_s = record.info.get(_USED_S)
        if used_s is None or time.monotonic() - used_s < PING_AFTER_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as exc:
            raise DisconnectionError from exc

    event.listen(engine, "checkin", note_use)
    event.listen(engine, "checkout", ping)


def _options(application: str, pool_size: int) -> dict[str, Any]:
    statement_s = SWEEP_STATEMENT_TIMEOUT_S if application == "ticker" else STATEMENT_TIMEOUT_S
    server = {
        "statement_timeout": statement_s * 1000,
        "lock_timeout": LOCK_TIMEOUT_S * 1000,
        "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_TIMEOUT_S * 1000,
        "timezone": "UTC",
    }
    return {
        "pool_size": pool_size,
        "max_overflow": pool_size,
        "pool_timeout": CONNECT_TIMEOUT_S,
        "hide_parameters": True,  # prompts are parameters, and errors are logged
        "connect_args": {
            "application_name": f"magi2-{application}",
            "connect_timeout": CONNECT_TIMEOUT_S,
            "keepalives_idle": 30,
            "options": " ".join(f"-c {name}={value}" for name, value in server.items()),
        },
    }
