"""Worker groups: their rows, heartbeats and which profiles are live. Leases of jobs are in `farm/jobs`."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection


@dataclass(frozen=True)
class Group:
    """What an agent says about itself when it registers; the id stays the same over its restarts."""

    id: str
    host: str
    profile: str
    devices: str
    boot_id: str


def register(conn: Connection, group: Group) -> None:
    """Write the row of an agent that starts, in state `booting`; what was wanted of its predecessor is forgotten."""
    ...


def heartbeat(
    conn: Connection, group_id: str, boot_id: str, state: str, fingerprint: dict[str, Any] | None = None
) -> str | None:
    """Record that the agent lives and in which state; return the wanted state, if an operator set one.

    Raises:
        NotFoundError: Another agent has taken this group over.
    """
    ...


def live_profiles(conn: Connection) -> set[str]:
    """Return the profiles that some group serves now; if there is none, those that any group served before."""
    ...
