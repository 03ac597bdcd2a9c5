"""Workers that die or sleep in the middle of a render, and a storm of such losses in which no job is lost."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farm.doorbell import DoorbellError, make_celery, publish_doorbell
from farm.embedded.valkey import ValkeyServer
from farm.jobs.states import ACTIVE, TERMINAL, State
from tests.chaos import invariants
from tests.service.worker.harness import PROFILE, Bench, WorkerProcess, chaos, descendants, wait_until

ROOT = Path(__file__).parents[2]


def stored_keys(s3):
    listing = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=s3.prefix)
    return {entry["Key"].removeprefix(f"{s3.prefix}/") for entry in listing.get("Contents", [])}


def group_of(worker: WorkerProcess) -> str:
    """Return the id of a worker's group, from its own folder."""
    file = worker.log.parent / "state" / "worker" / f"{PROFILE}-cpu0" / "group_id"
    wait_until(file.is_file, "the group's folder")
    return file.read_text()


def test_killed_worker_takes_its_ranks_along_and_another_takes_over(bench, start_worker, object_store):
    first = start_worker()
    job = bench.submit(chaos(step_s=0.2), steps=15)
    bench.wait_for_step(job)
    family = descendants(first.process.pid)
    assert family
    first.send(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not any(map(_alive, family)), "the ranks following their agent")
    second = start_worker()
    done = bench.wait(job, State.SUCCEEDED, State.FAILED)
    assert (done.state, done.epoch, done.infra_losses) == (State.SUCCEEDED, 2, 1)
    assert done.group_id == group_of(second) != bench.attempts(job)[0].group_id
    invariants.check(bench, [job], object_store)
    invariants.check_no_process_left(family)


def _alive(pid):
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.req("F-02")
def test_worker_that_slept_through_its_lease_changes_nothing(bench, start_worker, object_store, s3):
    sleeper = start_worker()
    job = bench.submit(chaos(step_s=0.1), steps=15)
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
    invariants.check(bench, [job, following], object_store)


def test_worker_that_starts_again_keeps_its_group_and_leaves_no_orphans(bench, start_worker, object_store):
    first = start_worker()
    job = bench.submit(chaos(step_s=0.2), steps=15)
    bench.wait_for_step(job)
    group_id = group_of(first)
    first.send(signal.SIGKILL)
    first.wait()
    again = start_worker(FARM_STATE_DIR=str(first.log.parent / "state"))
    assert bench.wait(job, State.SUCCEEDED).group_id == group_id
    assert not list((first.log.parent / "state" / "worker" / f"{PROFILE}-cpu0" / "work").iterdir())
    again.send(signal.SIGTERM)
    assert again.wait() == 0
    invariants.check(bench, [job], object_store)


@pytest.fixture
def broker(tmp_path_factory, farm_environment):
    """Start a broker of the test's own, which may be killed."""
    folder = tmp_path_factory.mktemp("broker")
    running = [ValkeyServer(folder, farm_environment)]
    running[0].wait_ready()
    farm_environment["REDIS_URL"] = running[0].url
    yield running
    running[0].stop()


def restart_empty(broker: list[ValkeyServer], farm_environment, folder: Path) -> None:
    """Kill the broker and start an empty one in its place."""
    port = broker[0].port
    broker[0].child.kill()
    broker[0] = ValkeyServer(folder, farm_environment, port=port)
    broker[0].wait_ready()


@pytest.fixture
def start_ticker(farm_environment, tmp_path):
    """Return a function that starts a ticker process."""
    started = []

    def start():
        with (tmp_path / f"ticker{len(started)}.log").open("wb") as log:
            ticker = subprocess.Popen(
                [sys.executable, "-m", "worker.ticker"],
                cwd=ROOT,
                env=farm_environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(ticker)
        return ticker

    yield start
    for ticker in started:
        ticker.kill()
        ticker.wait()


def wait_for_work(bench: Bench, worker: WorkerProcess, jobs) -> None:
    """Wait until a worker is in the middle of one of the jobs, or all are done."""
    group_id = group_of(worker)

    def is_busy():
        now = [bench.job(job.id) for job in jobs]
        at_work = any(job.group_id == group_id and job.state in ACTIVE for job in now)
        return at_work or all(job.state in TERMINAL for job in now)

    wait_until(is_busy, "a worker taking a job")


@pytest.mark.timeout(300)
def test_no_job_is_lost_or_doubled_in_a_storm(
    bench, broker, settings, farm_environment, start_worker, start_ticker, object_store, tmp_path
):
    ticker = start_ticker()
    workers = [start_worker(FARM_LIMITS__MAX_INFRA_LOSSES="50") for _ in range(2)]
    jobs = [bench.submit(chaos(step_s=0.05 + 0.02 * (number % 5)), steps=8) for number in range(16)]
    for round_number in range(3):
        victim = workers[round_number % 2]
        wait_for_work(bench, victim, jobs)
        victim.send(signal.SIGKILL)
        victim.wait()
        if round_number == 0:
            restart_empty(broker, farm_environment, tmp_path / "emptied")
        if round_number == 1:
            ticker.kill()
            ticker.wait()
            ticker = start_ticker()
        workers[round_number % 2] = start_worker(FARM_LIMITS__MAX_INFRA_LOSSES="50")
    wait_until(lambda: all(bench.job(job.id).state in TERMINAL for job in jobs), "the end of all jobs", 200)
    assert [bench.job(job.id).state for job in jobs] == [State.SUCCEEDED] * len(jobs)
    losses = sum(bench.job(job.id).infra_losses for job in jobs)
    assert losses <= 3, "more renders were wasted than workers were killed"
    invariants.check(bench, jobs, object_store)
    publisher = make_celery(settings)
    try:
        publish_doorbell(publisher, jobs[0].id, PROFILE)
    except DoorbellError:
        raise AssertionError("the broker did not come back") from None
    finally:
        publisher.close()
