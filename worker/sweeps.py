"""The sweeps of the ticker: everything that happens because time has passed.

Each sweep takes its own advisory lock for the length of its transaction, so any number of tickers may run.
What a sweep does to rows is the domain's business (`farm/jobs`, `farm/accounts`, ...); here is only when and
how often, and the order of store and database where objects are removed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine, func, select

from farm import idempotency
from farm.accounts import account_ids, recount
from farm.db.session import unit_of_work
from farm.groups import mark_gone
from farm.jobs.garbage import Deleter, deleted_assets, lost_attempts, mark_cleaned, mark_deleted
from farm.jobs.job import Rules
from farm.jobs.lifecycle import SWEEP_LIMIT, expire_queued, reap_leases
from farm.jobs.rering import re_ring
from farm.jobs.spill import spill_unfilled, spill_unserved
from farm.outbox import purge_sent
from farm.profiles import Profiles
from farm.retention import (
    DEFAULT_RETENTION,
    LIMIT,
    Retention,
    delete_empty_batches,
    delete_gone_images,
    delete_old_events,
    delete_old_jobs,
    delete_old_waves,
    expired_images,
    expired_outputs,
    mark_images_deleted,
)
from farm.watch.history import take_sample
from farm.webhooks.delivery_log import purge_old

log = structlog.get_logger(__name__)

STALE_UPLOAD_S = 86_400
LOCK_SPACE = 0x6D32  # of the advisory locks of sweeps


@dataclass(frozen=True)
class Sweeper:
    """What sweeps need; without profiles, no job is moved to another one."""

    engine: Engine
    store: Deleter
    rules: Rules
    retention: Retention = DEFAULT_RETENTION
    profiles: Profiles | None = None


@dataclass(frozen=True)
class Sweep:
    """One thing to do every so often; `run` returns how many rows it changed."""

    name: str
    every_s: float
    run: Callable[[Sweeper], int]
    is_quiet: bool = False  # changes something every time, which is no news


def sweep_leases(sweeper: Sweeper) -> int:
    """Take back active jobs that nobody keeps alive."""
    return _until_done(sweeper, "leases", lambda conn: reap_leases(conn, rules=sweeper.rules))


def sweep_ttl(sweeper: Sweeper) -> int:
    """Expire jobs that waited for too long."""
    return _until_done(sweeper, "ttl", expire_queued)


def sweep_rering(sweeper: Sweeper) -> int:
    """Ring again where jobs wait beside idle groups."""
    return _once(sweeper, "rering", re_ring)


def sweep_groups(sweeper: Sweeper) -> int:
    """Call silent groups gone."""
    return _once(sweeper, "groups", mark_gone)


def sweep_spill(sweeper: Sweeper) -> int:
    """Move jobs away from profiles that nobody serves."""
    profiles = sweeper.profiles
    return (
        0 if profiles is None else _until_done(sweeper, "spill", lambda conn: spill_unserved(conn, profiles))
    )


def sweep_waves(sweeper: Sweeper) -> int:
    """Move jobs away whose waves were not filled in time."""
    profiles = sweeper.profiles
    return 0 if profiles is None else _once(sweeper, "waves", lambda conn: spill_unfilled(conn, profiles))


def sweep_usage(sweeper: Sweeper) -> int:
    """Recount `account_usage`, one account at a time; a difference is a defect and is logged as one."""
    with unit_of_work(sweeper.engine) as conn:
        accounts = account_ids(conn)
    num_wrong = 0
    for account_id in accounts:
        with _exclusive(sweeper.engine, "usage") as conn:
            wrong = None if conn is None else recount(conn, account_id)
        if wrong is not None:
            num_wrong += 1
            log.error("usage_miscounted", account=account_id, was=wrong.was, counted=wrong.counted)
    return num_wrong


def sweep_outbox(sweeper: Sweeper) -> int:
    """Remove rows that were sent long ago."""
    return _once(sweeper, "outbox", purge_sent)


def sweep_lost_attempts(sweeper: Sweeper) -> int:
    """Remove objects of attempts that did not win; two tickers doing it at once do no harm."""
    with unit_of_work(sweeper.engine) as conn:
        attempts = lost_attempts(conn)
    for attempt in attempts:
        for key in attempt.keys:
            sweeper.store.delete(key)
    with unit_of_work(sweeper.engine) as conn:
        mark_cleaned(conn, attempts)
    return len(attempts)


def sweep_deleted(sweeper: Sweeper) -> int:
    """Remove the objects of deleted jobs, then mark their rows."""
    with unit_of_work(sweeper.engine) as conn:
        keys = deleted_assets(conn)
    for key in keys.values():
        sweeper.store.delete(key)
    with unit_of_work(sweeper.engine) as conn:
        mark_deleted(conn, list(keys))
    return len(keys)


def sweep_webhooks(sweeper: Sweeper) -> int:
    """Remove messages that are too old to be sent again."""
    return _until_done(sweeper, "webhooks", purge_old)


def sweep_expired(sweeper: Sweeper) -> int:
    """Remove objects whose time is over, a batch at a time, then mark their rows."""
    total = 0
    while True:
        with unit_of_work(sweeper.engine) as conn:
            outputs, images = expired_outputs(conn), expired_images(conn)
        for key in (*outputs.values(), *images.values()):
            sweeper.store.delete(key)
        with unit_of_work(sweeper.engine) as conn:
            mark_deleted(conn, list(outputs))
            mark_images_deleted(conn, list(images))
        total += len(outputs) + len(images)
        if max(len(outputs), len(images)) < LIMIT:
            return total


def sweep_retention(sweeper: Sweeper) -> int:
    """Delete rows whose time is over; those of objects go only after the objects."""
    kept = sweeper.retention
    acts: tuple[Callable[[Connection], int], ...] = (
        lambda conn: delete_old_jobs(conn, kept),
        lambda conn: delete_old_events(conn, kept),
        lambda conn: delete_empty_batches(conn, kept),
        lambda conn: delete_old_waves(conn, kept),
        delete_gone_images,
        idempotency.purge,
    )
    return sum(_until_done(sweeper, "retention", act) for act in acts)


def sweep_uploads(sweeper: Sweeper) -> int:
    """Abort multipart uploads that nobody has finished for a day."""
    return sweeper.store.abort_stale_uploads(STALE_UPLOAD_S)


def sweep_history(sweeper: Sweeper) -> int:
    """Write down how the farm is, for the overview."""
    return _once(sweeper, "history", take_sample)


SWEEPS = (
    Sweep("leases", 5, sweep_leases),
    Sweep("ttl", 10, sweep_ttl),
    Sweep("rering", 10, sweep_rering),
    Sweep("groups", 10, sweep_groups),
    Sweep("usage", 600, sweep_usage),
    Sweep("lost_attempts", 600, sweep_lost_attempts),
    Sweep("deleted", 600, sweep_deleted),
    Sweep("outbox", 3600, sweep_outbox),
    Sweep("webhooks", 600, sweep_webhooks),
    Sweep("expired", 600, sweep_expired),
    Sweep("retention", 600, sweep_retention),
    Sweep("uploads", 3600, sweep_uploads),
    Sweep("spill", 60, sweep_spill),
    Sweep("waves", 5, sweep_waves),
    Sweep("history", 60, sweep_history, is_quiet=True),
)
_NUMBERS = {sweep.name: number for number, sweep in enumerate(SWEEPS)}


@contextmanager
def _exclusive(engine: Engine, name: str) -> Iterator[Connection | None]:
    """Give a transaction that holds the lock of a sweep, or None while another ticker holds it."""
    with unit_of_work(engine) as conn:
        lock = func.pg_try_advisory_xact_lock(LOCK_SPACE, _NUMBERS[name])
        yield conn if conn.execute(select(lock)).scalar_one() else None


def _once(sweeper: Sweeper, name: str, act: Callable[[Connection], int]) -> int:
    with _exclusive(sweeper.engine, name) as conn:
        return 0 if conn is None else act(conn)


def _until_done(sweeper: Sweeper, name: str, act: Callable[[Connection], int]) -> int:
    """Repeat a sweep of limited size, each time in a transaction of its own, until little is left."""
    total = 0
    while True:
        num_done = _once(sweeper, name, act)
        total += num_done
        if num_done < SWEEP_LIMIT:
            return total
