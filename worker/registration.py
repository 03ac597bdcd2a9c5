"""How an agent gets its row: at once, or, where an operator has drained the group, once that is taken back.

Whatever starts workers anew (a container runtime, systemd, the embedded supervisor) also starts one that left
for a drain. It then waits here, without ranks, doorbells or a heartbeat: the group stays `gone` until then.
"""

import threading
from collections.abc import Callable

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from farm import groups
from farm.db.session import unit_of_work
from farm.groups import Group

log = structlog.get_logger(__name__)

RETRY_S = 2.0


def register_when_wanted(
    database: Engine,
    row: Group,
    leave: threading.Event,
    *,
    on_drain: Callable[[], None],
    on_resume: Callable[[], None],
) -> bool:
    """Write the group's row once the database is there and no drain stands; False if the agent leaves first.

    `on_drain` and `on_resume` are called around a wait for `undrain`.
    """
    is_waiting = False
    while not leave.is_set():
        try:
            with unit_of_work(database) as conn:
                is_drained = groups.is_drained(conn, row.id)
                if not is_drained:
                    groups.register(conn, row)
        except SQLAlchemyError as error:
            log.warning("not_registered", err=type(error).__name__)
        else:
            if not is_drained:
                break
            if not is_waiting:
                log.info("drained", group=row.id, remedy=f"magi2-farm groups undrain {row.id}")
                is_waiting = True
                on_drain()
        leave.wait(RETRY_S)
    else:
        return False
    if is_waiting:
        log.info("undrain", group=row.id)
        on_resume()
    return True
