"""Engines and the unit of work. This module is the only one that commits.

A unit of work is short: no network call but the database's happens inside it. Every connection has the time-outs of
its role set by the server, so a forgotten lock or a slow query ends by itself.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from farm.settings import Settings


def make_engine(settings: Settings, *, application: str, pool_size: int = 5) -> Engine:
    """Return a pool of connections for threads; `application` (api, agent, ticker, ...) chooses the time-outs."""
    ...


def make_async_engine(settings: Settings, *, application: str, pool_size: int = 10) -> AsyncEngine:
    """Return a pool of connections for an event loop."""
    ...


@contextmanager
def unit_of_work(engine: Engine) -> Iterator[Connection]:
    """Give a connection in a transaction; commit at the end, roll back on any exception."""
    ...


@asynccontextmanager
async def async_unit_of_work(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Give a connection in a transaction; commit at the end, roll back on any exception or cancellation."""
    ...
