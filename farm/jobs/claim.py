"""Take a job for a group: fair between accounts, exact in its limits, never waiting while it holds a row.

An account is chosen first: urgent work, then the fewest running jobs, then the longest wait. Its
`account_usage` row is locked with SKIP LOCKED under a savepoint, which makes `max_running` exact, and inside
that the first job is taken with SKIP LOCKED; an account that yields nothing is let go before the next is
tried. Order inside an account is the static `rank_at`, so no sort looks at the clock.
"""

import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, text

from farm.jobs.job import DEFAULT_RULES, Claimed, Job, Rules
from farm.jobs.states import State
from farm.jobs.transition import Locked, move

URGENT_PRIORITY = 5
MAX_ACCOUNTS = 8
# Work that another claim holds for a moment is looked for again, this long and after pauses of this length:
# shorter ones cost the database more than they save (docs/benchmarks.md, T-07).
PATIENCE_S = 1.0
PAUSE_S = (0.02, 0.08)
GROUP_FRESH_S = 30
_RANDOM = secrets.SystemRandom()

# Of a row `j` of job: it may start on this group now.
ELIGIBLE = """
    j.state = 'queued' AND j.profile = :profile AND j.not_before <= now()
    AND NOT EXISTS (SELECT FROM profile_control c WHERE c.profile = :profile AND c.paused)
    AND j.contract_version = ANY(:versions)
    AND (j.avoid_group IS NULL OR j.avoid_group <> :group_id OR NOT EXISTS (
        SELECT FROM worker_group g
        WHERE g.profile = :profile AND g.id <> :group_id AND g.state IN ('ready', 'busy')
          AND g.heartbeat_at > now() - make_interval(secs => :fresh_s)))
"""
_ACCOUNTS = text(
    f"""
    SELECT u.account_id
    FROM account_usage u
    JOIN account a ON a.id = u.account_id
    CROSS JOIN LATERAL (
        SELECT j.rank_at, j.priority FROM job j
        WHERE j.account_id = u.account_id AND {ELIGIBLE}
        ORDER BY j.rank_at, j.id LIMIT 1) head
    WHERE u.queued > 0 AND a.status = 'active'
      AND u.running < coalesce((a.limits->>'max_running')::int, :max_running)
    ORDER BY (head.priority >= :urgent) DESC, u.running, head.rank_at, u.account_id
    LIMIT :max_accounts
    """  # noqa: S608 - the only thing put in is the constant above
)
# One statement: the first of the accounts whose row is free, and only once that is locked, its first job that
# nobody else has. No row: no account was free. A row without a job: that one had no such job.
_TAKE = text(
    f"""
    WITH mine AS MATERIALIZED (
        SELECT u.account_id
        FROM account_usage u
        JOIN account a ON a.id = u.account_id
        WHERE u.account_id = ANY(:accounts) AND a.status = 'active'
          AND u.running < coalesce((a.limits->>'max_running')::int, :max_running)
        ORDER BY array_position(CAST(:accounts AS text[]), u.account_id) LIMIT 1
        FOR UPDATE OF u SKIP LOCKED)
    SELECT mine.account_id AS mine_id, head.*, clock_timestamp() AS now_at
    FROM mine LEFT JOIN LATERAL (
        SELECT j.* FROM job j
        WHERE j.account_id = mine.account_id AND {ELIGIBLE}
        ORDER BY j.rank_at, j.id LIMIT 1
        FOR UPDATE SKIP LOCKED) head ON true
    """  # noqa: S608 - the only thing put in is the constant above
)


def claim(
    conn: Connection,
    group_id: str,
    profile: str,
    boot_id: str,
    contract_versions: Collection[int],
    *,
    rules: Rules = DEFAULT_RULES,
) -> Claimed | None:
    """Move the next job of a profile to `starting` under a new epoch and a lease; None when there is none.

    Args:
        conn: A transaction that has locked nothing yet; the caller commits at once.
        group_id: Who will run it.
        profile: What the group serves.
        boot_id: Of the agent process; kept with the attempt.
        contract_versions: Which jobs this worker understands; newer ones are left alone.
        rules: Length of the lease, and `max_running` of accounts that have none of their own.
    """
    values = {
        "group_id": group_id,
        "profile": profile,
        "versions": list(contract_versions),
        "max_running": rules.max_running,
        "urgent": URGENT_PRIORITY,
        "max_accounts": MAX_ACCOUNTS,
        "fresh_s": GROUP_FRESH_S,
    }
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        accounts = list(conn.execute(_ACCOUNTS, values).scalars())
        locked = _take(conn, values, accounts)
        if locked is not None:
            return Claimed(start(conn, locked, group_id, boot_id, rules), rules.lease_s)
        if not accounts or time.monotonic() > give_up_s:
            return None
        pause_briefly()


def pause_briefly() -> None:
    """Leave others the moment that they need to let go of what they hold."""
    time.sleep(_RANDOM.uniform(*PAUSE_S))


def start(
    conn: Connection, locked: Locked, group_id: str, boot_id: str, rules: Rules, *, wave_id: str | None = None
) -> Job:
    """Move a locked job to `starting`, alone or as a member of a wave."""
    alongside = {} if wave_id is None else {"wave_id": wave_id}
    named = {} if wave_id is None else {"wave": wave_id}
    started = move(
        conn,
        locked,
        to=State.STARTING,
        event_data={"group": group_id, **named},
        attempt={"worker_boot_id": boot_id, **alongside},
        after_s={"lease_until": rules.lease_s, "attempt_deadline": locked.job.exec_timeout_s},
        group_id=group_id,
    )
    if started is None:
        raise RuntimeError(f"{locked.job.id} was locked as queued and could not be started")
    return started


def _take(conn: Connection, values: dict[str, Any], accounts: Sequence[str]) -> Locked | None:
    """Lock the first account that can be had at once, and its first job; without one nothing stays so."""
    left = list(accounts)
    while left:
        savepoint = conn.begin_nested()
        row = conn.execute(_TAKE, {**values, "accounts": left}).mappings().one_or_none()
        if row is not None and row["id"] is not None:
            savepoint.commit()
            return Locked.from_row({name: value for name, value in row.items() if name != "mine_id"})
        savepoint.rollback()
        if row is None:
            return None
        left.remove(row["mine_id"])
    return None
