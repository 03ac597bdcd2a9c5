"""Form a wave for a data-parallel group: one to N jobs with one key, claimed in one transaction or not.

What may run is read without locks and a choice is made (`choose`, which is pure): a full wave goes at once;
one that cannot be filled waits, and after `wave_max_wait_s` from its oldest member is padded if the profile
says so. Who was in two crashed waves is claimed without neighbours. Then the accounts' rows, in the order of
their ids, and the jobs are locked with SKIP LOCKED under a savepoint; unless all that was chosen is still
there and within `max_running`, everything is let go and the choice is made anew.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, text

from farm.db.session import after_commit
from farm.db.tables import wave
from farm.ids import new_id
from farm.jobs.claim import (
    ELIGIBLE,
    GROUP_FRESH_S,
    PATIENCE_S,
    URGENT_PRIORITY,
    pause_briefly,
    start,
)
from farm.jobs.job import DEFAULT_RULES, Claimed, Job, Rules
from farm.jobs.transition import Locked
from farm.metrics.moves import count_wave
from farm.profile_control import Control, get_control
from farm.waves import ALONE_AFTER, slots_to_fill

# Accounts with work and room; the limits are exact only under the locks that are taken later.
_ROOM = """
    SELECT u.account_id, u.running,
           coalesce((a.limits->>'max_running')::int, :max_running) - u.running AS room
    FROM account_usage u JOIN account a ON a.id = u.account_id
    WHERE u.queued > 0 AND a.status = 'active'
      AND u.running < coalesce((a.limits->>'max_running')::int, :max_running)
"""
_CANDIDATES = text(
    f"""
    WITH RECURSIVE keys(wave_key) AS (
        (SELECT j.wave_key FROM job j WHERE j.state = 'queued' AND j.profile = :profile
         ORDER BY j.wave_key LIMIT 1)
        UNION ALL
        SELECT (SELECT j.wave_key FROM job j
                WHERE j.state = 'queued' AND j.profile = :profile AND j.wave_key > keys.wave_key
                ORDER BY j.wave_key LIMIT 1)
        FROM keys WHERE keys.wave_key IS NOT NULL),
    room AS MATERIALIZED ({_ROOM})
    SELECT c.*, room.running + c.nth AS running_then
    FROM keys CROSS JOIN room CROSS JOIN LATERAL (
        SELECT j.id, j.account_id, j.wave_key, j.rank_at, j.priority >= :urgent AS is_urgent,
               j.crashed_waves >= :alone_after AS is_alone,
               extract(epoch FROM clock_timestamp() - greatest(j.queued_at, j.not_before))::float AS waited_s,
               row_number() OVER (ORDER BY j.rank_at, j.id) AS nth
        FROM job j
        WHERE j.wave_key = keys.wave_key AND j.account_id = room.account_id AND {ELIGIBLE}
        ORDER BY j.rank_at, j.id LIMIT least(room.room, :num_slots)) c
    WHERE keys.wave_key IS NOT NULL
    """  # noqa: S608 - the only things put in are constants
)
_LOCK_ACCOUNTS = text(
    f"""
    SELECT r.account_id, r.room FROM ({_ROOM} AND u.account_id = ANY(:accounts)
    ORDER BY u.account_id FOR UPDATE OF u SKIP LOCKED) r
    """  # noqa: S608 - as above
)
_LOCK_JOBS = text(
    f"""
    SELECT j.*, clock_timestamp() AS now_at FROM job j
    WHERE j.id = ANY(:jobs) AND {ELIGIBLE}
    ORDER BY j.id FOR UPDATE SKIP LOCKED
    """  # noqa: S608 - as above
)


@dataclass(frozen=True)
class Candidate:
    """A job that may run now; `running_then`: jobs that its account runs once it and those before it run."""

    id: str
    account_id: str
    wave_key: str
    rank_at: datetime
    is_urgent: bool
    is_alone: bool
    waited_s: float
    running_then: int

    @property
    def order(self) -> tuple[bool, int, datetime, str]:
        """Sort as the claim of single jobs does: urgent first, then fair share, then the longest wait."""
        return (not self.is_urgent, self.running_then, self.rank_at, self.id)


@dataclass(frozen=True)
class Choice:
    """Who shall run together, and why now: the wave is full, was waited for long enough, or is one alone."""

    members: list[Candidate]
    fill: str

    @property
    def waited_s(self) -> float:
        """Return how long its oldest member has waited."""
        return max(member.waited_s for member in self.members)


@dataclass(frozen=True)
class ClaimedWave:
    """The members that this group now holds; the other slots of `num_slots` are ghosts."""

    id: str
    num_slots: int
    members: list[Claimed]


def choose(candidates: Sequence[Candidate], control: Control, num_slots: int) -> Choice | None:
    """Return the wave to start now, the fairest of those that are ready; None while none is."""
    slots = slots_to_fill(control, num_slots)
    ready = [Choice([lonely], "alone") for lonely in candidates if lonely.is_alone]
    by_key: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if not candidate.is_alone:
            by_key[candidate.wave_key].append(candidate)
    for members in by_key.values():
        members.sort(key=lambda member: member.order)
        if len(members) >= slots:
            ready.append(Choice(members[:slots], "full"))
        elif control.wave_fill == "pad" and Choice(members, "pad").waited_s >= control.wave_max_wait_s:
            ready.append(Choice(members, "pad"))
    return min(ready, key=lambda choice: choice.members[0].order, default=None)


def claim_wave(
    conn: Connection,
    group_id: str,
    profile: str,
    boot_id: str,
    contract_versions: Collection[int],
    *,
    num_slots: int,
    rules: Rules = DEFAULT_RULES,
) -> ClaimedWave | None:
    """Move the members of the next wave to `starting`, all or none; None when no wave is ready.

    Arguments are those of `claim`; `num_slots` is how many the layout of the group has.
    """
    values = {
        "group_id": group_id,
        "profile": profile,
        "versions": list(contract_versions),
        "max_running": rules.max_running,
        "urgent": URGENT_PRIORITY,
        "alone_after": ALONE_AFTER,
        "num_slots": num_slots,
        "fresh_s": GROUP_FRESH_S,
    }
    give_up_s = time.monotonic() + PATIENCE_S
    control = get_control(conn, profile)
    while True:
        rows = conn.execute(_CANDIDATES, values).mappings().all()
        candidates = [_candidate(row) for row in rows]
        choice = choose(candidates, control, num_slots)
        if choice is None:
            return None
        locked = _lock(conn, choice, values)
        if locked is not None:
            return _start_all(conn, choice, locked, _Group(group_id, profile, boot_id, num_slots, rules))
        if time.monotonic() > give_up_s:
            return None
        pause_briefly()


@dataclass(frozen=True)
class _Group:
    id: str
    profile: str
    boot_id: str
    num_slots: int
    rules: Rules


def _candidate(row: Any) -> Candidate:
    return Candidate(**{name: row[name] for name in Candidate.__dataclass_fields__})


def _lock(conn: Connection, choice: Choice, values: dict[str, Any]) -> list[Locked] | None:
    """Lock all members and their accounts, or nothing."""
    accounts = Counter(member.account_id for member in choice.members)
    savepoint = conn.begin_nested()
    rooms = conn.execute(_LOCK_ACCOUNTS, {**values, "accounts": list(accounts)}).all()
    room = {row.account_id: row.room for row in rooms}
    if all(room.get(account_id, 0) >= count for account_id, count in accounts.items()):
        wanted = {**values, "jobs": [member.id for member in choice.members]}
        rows = conn.execute(_LOCK_JOBS, wanted).mappings().all()
        if len(rows) == len(choice.members):
            savepoint.commit()
            return [Locked.from_row(row) for row in rows]
    savepoint.rollback()
    return None


def _start_all(conn: Connection, choice: Choice, locked: Sequence[Locked], group: _Group) -> ClaimedWave:
    wave_id = new_id("wave")
    row = {
        "id": wave_id,
        "profile": group.profile,
        "wave_key": choice.members[0].wave_key,
        "group_id": group.id,
        "num_slots": group.num_slots,
        "num_members": len(locked),
        "num_ghosts": group.num_slots - len(locked),
        "fill": choice.fill,
        "waited_s": round(max(0.0, choice.waited_s)),
    }
    conn.execute(insert(wave).values(**row))
    after_commit(conn, lambda: count_wave(group.profile, group.num_slots - len(locked), choice.waited_s))
    started: dict[str, Job] = {
        held.job.id: start(conn, held, group.id, group.boot_id, group.rules, wave_id=wave_id)
        for held in locked
    }
    members = [Claimed(started[member.id], group.rules.lease_s) for member in choice.members]
    return ClaimedWave(wave_id, group.num_slots, members)
