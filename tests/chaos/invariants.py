"""What must hold after every run, however it was disturbed (I1-I8 and I10 of the farm's specification)."""

import hashlib

from sqlalchemy import func, select

from farm.db import tables
from farm.db.session import unit_of_work
from farm.jobs.states import ACTIVE, TERMINAL, State
from tests.service.worker.harness import Bench, is_alive


def check(bench: Bench, jobs, object_store) -> None:
    """Check everything that rows and objects can tell about these jobs."""
    for submitted in jobs:
        job = bench.job(submitted.id)
        assert job.state in TERMINAL, f"{job.id} never ended"
        bench.event_types(job)
        _check_epochs(bench, job)
        outcomes = [attempt.outcome for attempt in bench.attempts(job)]
        assert outcomes.count("succeeded") == (job.state == State.SUCCEEDED)
        assert None not in outcomes
        _check_objects(bench, job, object_store)
    _check_usage(bench)


def check_no_process_left(pids) -> None:
    """Check that nothing of a dead agent lives on."""
    assert not [pid for pid in pids if is_alive(pid)]


def _check_epochs(bench, job):
    with unit_of_work(bench.database) as conn:
        query = select(tables.job_event.c.epoch).where(tables.job_event.c.job_id == job.id)
        epochs = conn.execute(query.order_by(tables.job_event.c.seq)).scalars().all()
    assert epochs == sorted(epochs)
    assert [attempt.epoch for attempt in bench.attempts(job)] == list(range(1, job.epoch + 1))


def _check_objects(bench, job, object_store):
    assets = bench.assets(job)
    wanted = {"video", "thumb", "sprite", "audio", "meta"} if job.state == State.SUCCEEDED else set()
    assert set(assets) == wanted
    for asset in assets.values():
        assert asset.epoch == job.epoch
        body = object_store.open_range(asset.key).read()
        assert hashlib.sha256(body).hexdigest() == asset.sha256


def _check_usage(bench):
    state, account = tables.job.c.state, tables.job.c.account_id == bench.account_id
    with unit_of_work(bench.database) as conn:
        usage = tables.account_usage
        kept = conn.execute(
            select(usage.c.queued, usage.c.running).where(usage.c.account_id == bench.account_id)
        ).one()
        queued = conn.execute(select(func.count()).where(account, state == State.QUEUED)).scalar_one()
        running = conn.execute(select(func.count()).where(account, state.in_(ACTIVE))).scalar_one()
    assert tuple(kept) == (queued, running)
