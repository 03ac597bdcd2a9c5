"""A worker whose database traffic is cut off for longer than its lease comes back, and changes nothing.

A proxy of the test's own goes silent while the worker is in a phase; the lease is swept, another group
finishes the job, and then the traffic flows again. The first time the worker rests in its phase until then;
the second time it goes on while it is cut off, and what it then writes arrives late. Nothing that anybody can
see may change: no row, no object.
"""

import threading
from dataclasses import dataclass, field

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from farm.db.session import unit_of_work
from farm.jobs import lifecycle
from farm.jobs.claim import claim
from farm.jobs.job import NewAsset, Rules
from farm.jobs.lifecycle import Result
from farm.jobs.states import State
from farm.storage import ObjectStore, output_key
from magi2.contract import CONTRACT_VERSION
from tests.chaos.ends import check_ended, stored_keys
from tests.chaos.proxy import Proxy
from tests.service.worker.harness import PROFILE, AgentThread, chaos, wait_until
from worker import outputs
from worker.attempt import Attempt

WAIT_S = 100.0
OTHER = "group_other"
ROWS = (
    "SELECT * FROM job WHERE id = :id",
    "SELECT * FROM job_event WHERE job_id = :id",
    "SELECT epoch, group_id, outcome, error, ended_at, uploading_at FROM job_attempt WHERE job_id = :id",
    "SELECT * FROM asset WHERE job_id = :id",
    "SELECT * FROM webhook_message WHERE job_id = :id",
)


@dataclass
class Gate:
    """Where the first attempt stops, and what lets it go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def pass_through(self, epoch: int) -> None:
        """Hold up the first attempt, once."""
        if epoch == 1 and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(WAIT_S)


def hold_up(monkeypatch, gate, place, epoch_of):
    """Put a gate in front of a function, or, for a transaction, between its last statement and its commit."""
    owner, name = place
    original = getattr(owner, name)

    def gated(*arguments, **options):
        if owner is lifecycle:
            answer = original(*arguments, **options)
            gate.pass_through(epoch_of(*arguments))
            return answer
        gate.pass_through(epoch_of(*arguments))
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, gated)


def of_attempt(attempt, *_):
    return attempt.claimed.epoch


def of_step(attempt, report):
    return attempt.claimed.epoch if (report.phase, report.step) >= ("denoise", 1) else 0


def of_object(_store, key, *_):
    return 1 if key.endswith("/e1/sprite.jpg") else 0  # the clip is stored, the rest is not


def of_write(_conn, _job_id, epoch, *_):
    return epoch


PHASES = {
    "starting: before the input is fetched": ((Attempt, "fetch_input"), of_attempt),
    "starting: before it is marked as running": ((Attempt, "_begin_running"), of_attempt),
    "starting: before that is committed": ((lifecycle, "mark_running"), of_write),
    "running: in the middle of the steps": ((Attempt, "take"), of_step),
    "running: when the render is finished": ((Attempt, "accept"), of_attempt),
    "running: before the check of the file": ((outputs, "check_output"), of_attempt),
    "running: before it is marked as uploading": ((outputs, "upload"), of_attempt),
    "uploading: in the middle of the objects": ((ObjectStore, "put"), of_object),
    "uploading: between upload and success": ((outputs, "succeed"), of_attempt),
    "uploading: between success and commit": ((lifecycle, "succeed"), of_write),
}


@pytest.fixture
def proxy(postgres):
    proxy = Proxy(postgres.port)
    yield proxy
    proxy.close()


@pytest.fixture
def agent(settings, farm_environment, proxy):
    """Return an agent that reaches the database through the proxy; its lease is short."""
    through = make_url(settings.database_url).set(port=proxy.port)
    worker = settings.worker.model_copy(update={"lease_s": 2.0, "heartbeat_s": 0.3})
    changes = {"database_url": through.render_as_string(hide_password=False), "worker": worker}
    agent = AgentThread(settings.model_copy(update=changes), farm_environment)
    agent.wait_ready()
    yield agent
    proxy.mend()
    agent.stop()


def finish_elsewhere(bench, job, store):
    """Sweep the lease when it has run out, and have another group finish the job."""

    def is_swept():
        bench.sweep()
        return bench.job(job.id).state is State.QUEUED

    wait_until(is_swept, "the end of the lease")
    rules = Rules(lease_s=600)
    with unit_of_work(bench.database) as conn:
        claimed = claim(conn, OTHER, PROFILE, "boot_other", [CONTRACT_VERSION], rules=rules)
    assert claimed.job.id == job.id
    assert claimed.epoch == 2
    with unit_of_work(bench.database) as conn:
        assert lifecycle.mark_running(conn, job.id, 2)
    with unit_of_work(bench.database) as conn:
        assert lifecycle.mark_uploading(conn, job.id, 2)
    key = output_key(job.account_id, job.id, 2, "video.mp4", job.created_at)
    stored = store.put(key, b"the clip of the other group", "video/mp4")
    video = NewAsset("video", key, stored.bytes, stored.sha256, "video/mp4")
    with unit_of_work(bench.database) as conn:
        assert lifecycle.succeed(conn, job.id, 2, Result({}, [video]))


def rows_of(bench, job):
    with unit_of_work(bench.database) as conn:
        return [sorted(map(str, conn.execute(text(query), {"id": job.id}).all())) for query in ROWS]


def cut_off(bench, gate, proxy, object_store, *, goes_on):
    """Cut the worker off in its phase until another group has finished the job; nothing may change then."""
    job = bench.submit(chaos(step_s=0.15))
    assert gate.reached.wait(WAIT_S)
    proxy.cut()
    if goes_on:
        gate.opened.set()
    finish_elsewhere(bench, job, object_store)
    after = rows_of(bench, job)
    gate.opened.set()
    proxy.mend()
    following = bench.submit()
    bench.wait(following, State.SUCCEEDED)
    assert rows_of(bench, job) == after
    assert bench.job(job.id).group_id == OTHER
    return [job, following]


@pytest.mark.req("F-02")
@pytest.mark.usefixtures("agent")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_worker_that_was_cut_off_in_a_phase_changes_nothing(
    bench, proxy, object_store, s3, monkeypatch, phase
):
    jobs = []
    for goes_on in (False, True):
        gate = Gate()
        with monkeypatch.context() as patch:
            hold_up(patch, gate, *PHASES[phase])
            jobs += cut_off(bench, gate, proxy, object_store, goes_on=goes_on)
    check_ended(bench, jobs, object_store, s3)
    assert not [key for key in stored_keys(s3) for job in jobs[::2] if f"{job.id}/e1/" in key]
