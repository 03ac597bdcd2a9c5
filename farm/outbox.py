"""The outbox: what must be published because something was committed.

Rows are written in the transaction that asks for them and published afterwards by whoever runs `relay_once`. A row may
be published twice, never not at all; order is not promised.
"""

from collections.abc import Callable

from sqlalchemy import Connection, Engine

CHANNEL = "magi2_outbox"
Publish = Callable[[str, str], None]  # (job_id, profile); raises when the broker did not take it


def enqueue_doorbell(conn: Connection, job_id: str, profile: str) -> None:
    """Ask for a doorbell in the caller's transaction, and wake the relays at its commit."""
    ...


def relay_once(engine: Engine, publish: Publish) -> int:
    """Publish up to 100 unsent rows, stopping at the first failure; return how many were sent."""
    ...
