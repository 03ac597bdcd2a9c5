"""Wait for a NOTIFY, or for a time-out, whichever is first.

A notification is only a hint to look at once: it may be lost while the connection is away, so who waits here
looks again after every time-out too.
"""

import threading
from types import TracebackType

import psycopg
from psycopg import sql

from farm.db.session import CONNECT_TIMEOUT_S
from farm.settings import Settings


class Listener:
    """One connection of its own that listens to one channel and comes back by itself."""

    def __init__(self, settings: Settings, channel: str) -> None:
        """Remember what to listen to; nothing is connected yet."""
        self._url = settings.database_url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._channel = channel
        self._conn: psycopg.Connection | None = None

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def wait(self, timeout_s: float, stop: threading.Event) -> bool:
        """Return True at the first notification, False after the time-out or when there is no connection."""
        try:
            conn = self._connected()
            return any(True for _ in conn.notifies(timeout=timeout_s, stop_after=1))
        except psycopg.OperationalError:
            self._close()
            stop.wait(timeout_s)
            return False

    def _connected(self) -> psycopg.Connection:
        if self._conn is None:
            self._conn = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="magi2-listener",
            )
            self._conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        return self._conn

    def _close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None
