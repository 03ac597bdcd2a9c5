"""Workers that die or sleep in the middle of a render; the storm of such losses is in `test_storm.py`."""

import signal

import pytest

from farm.jobs.states import State
from tests.chaos.ends import check_ended, stored_keys
from tests.service.worker.harness import PROFILE, WorkerProcess, chaos, descendants, is_alive, wait_until

pytestmark = pytest.mark.timeout(600)  # workers start, and leases run out, on whatever cores there are

# The first attempt is in the middle of its steps whenever the kill comes, the second one is quick.
HANGS_AT_FIRST = chaos(do="freeze", at=5, epochs=[1], step_s=0.05)


def group_of(worker: WorkerProcess) -> str:
    """Return the id of a worker's group, from its own folder."""
    file = worker.log.parent / "state" / "worker" / f"{PROFILE}-cpu0" / "group_id"
    wait_until(file.is_file, "the group's folder")
    return file.read_text()


def test_killed_worker_takes_its_ranks_along_and_another_takes_over(bench, start_worker, object_store, s3):
    first = start_worker()
    job = bench.submit(HANGS_AT_FIRST, steps=15)
    bench.wait_for_step(job)
    family = descendants(first.process.pid)
    assert family
    first.send(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not any(map(is_alive, family)), "the ranks following their agent")
    second = start_worker()
    done = bench.wait(job, State.SUCCEEDED, State.FAILED)
    assert (done.state, done.epoch, done.infra_losses) == (State.SUCCEEDED, 2, 1)
    assert done.group_id == group_of(second) != bench.attempts(job)[0].group_id
    check_ended(bench, [job], object_store, s3)


@pytest.mark.req("F-02")
def test_worker_that_slept_through_its_lease_changes_nothing(bench, start_worker, object_store, s3):
    sleeper = start_worker()
    job = bench.submit(chaos(step_s=0.3), steps=15)
    bench.wait_for_step(job)
    sleeper.send(signal.SIGSTOP)
    other = start_worker()
    bench.wait(job, State.SUCCEEDED)
    sleeper.send(signal.SIGCONT)
    wait_until(lambda: b"lease_lost" in sleeper.log.read_bytes(), "the sleeper finding out")
    done = bench.job(job.id)
    assert (done.epoch, done.group_id) == (2, group_of(other))
    assert stored_keys(s3) == {asset.key for asset in bench.assets(job).values()}
    other.send(signal.SIGTERM)
    assert other.wait() == 0
    following = bench.submit()
    assert bench.wait(following, State.SUCCEEDED).group_id == group_of(sleeper)
    check_ended(bench, [job, following], object_store, s3)


def test_worker_that_starts_again_keeps_its_group_and_leaves_no_orphans(
    bench, start_worker, object_store, s3
):
    first = start_worker()
    job = bench.submit(HANGS_AT_FIRST, steps=15)
    bench.wait_for_step(job)
    group_id = group_of(first)
    first.send(signal.SIGKILL)
    first.wait()
    again = start_worker(FARM_STATE_DIR=str(first.log.parent / "state"))
    assert bench.wait(job, State.SUCCEEDED).group_id == group_id
    assert not list((first.log.parent / "state" / "worker" / f"{PROFILE}-cpu0" / "work").iterdir())
    again.send(signal.SIGTERM)
    assert again.wait() == 0
    check_ended(bench, [job], object_store, s3)


def test_worker_stops_its_ranks_as_soon_as_it_hears_that_the_job_is_not_its_own(bench, start_worker):
    worker = start_worker()
    job = bench.submit(chaos(step_s=10), steps=20)  # far longer than what is waited for below
    wait_until(lambda: bench.job(job.id).state is State.RUNNING, "the render")
    bench.take_over(job, "group_other")
    wait_until(lambda: b"lease_lost" in worker.log.read_bytes(), "the worker letting go")
    assert bench.job(job.id).group_id == "group_other"
