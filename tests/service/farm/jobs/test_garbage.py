"""Objects that nobody may see are removed, and none that somebody may."""

import pytest

from farm.errors import NotFoundError
from farm.jobs import lifecycle, queries
from farm.jobs.control import delete_job, retry
from farm.jobs.garbage import OUTPUT_NAMES
from farm.jobs.job import NewAsset
from farm.jobs.lifecycle import Result
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State
from farm.storage import StorageError, output_key
from worker.sweeps import Sweeper, sweep_deleted, sweep_lost_attempts


class Store:
    """Remembers which keys exist."""

    def __init__(self):
        self.keys = set()
        self.is_down = False

    def delete(self, key):
        if self.is_down:
            raise StorageError("away")
        self.keys.discard(key)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def sweeper(driver, store):
    return Sweeper(driver.engine, store, driver.rules)


def upload(store, job, epoch):
    """Store what an agent stores for an attempt, and return its keys."""
    keys = {output_key(job.account_id, job.id, epoch, name, job.created_at) for name in OUTPUT_NAMES}
    store.keys |= keys
    return keys


def finish(driver, job, epoch):
    key = output_key(job.account_id, job.id, epoch, "video.mp4", job.created_at)
    result = Result({}, [NewAsset("video", key, 10, "ab" * 32, "video/mp4")])
    assert driver.run(lifecycle.succeed, job.id, epoch, result)
    return key


@pytest.mark.req("F-20")
def test_objects_of_an_attempt_that_failed_are_removed_and_those_of_the_winner_stay(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    upload(store, job, 1)
    driver.run(lifecycle.release, job.id, 1)
    epoch = driver.claim().epoch
    driver.run(lifecycle.mark_running, job.id, epoch)
    driver.run(lifecycle.mark_uploading, job.id, epoch)
    winning = upload(store, job, 2)
    finish(driver, job, 2)
    assert sweep_lost_attempts(sweeper) == 1
    assert store.keys == winning
    assert sweep_lost_attempts(sweeper) == 0


@pytest.mark.req("F-20")
def test_an_attempt_that_is_still_uploading_is_left_alone(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    keys = upload(store, job, 1)
    assert sweep_lost_attempts(sweeper) == 0
    assert store.keys == keys


def test_an_attempt_that_never_reached_the_upload_has_nothing_to_remove(driver, sweeper):
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.release, job.id, 1)
    assert sweep_lost_attempts(sweeper) == 0


@pytest.mark.req("F-20")
def test_what_a_zombie_uploads_after_the_sweep_is_removed_by_a_later_one(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    driver.age(job.id, lease_until="1 second")
    driver.run(lifecycle.reap_leases)
    assert sweep_lost_attempts(sweeper) == 1
    upload(store, job, 1)
    assert sweep_lost_attempts(sweeper) == 1
    assert store.keys == set()
    driver.sql("UPDATE job_attempt SET ended_at = now() - interval '61 minutes'")
    assert sweep_lost_attempts(sweeper) == 1
    assert sweep_lost_attempts(sweeper) == 0


def test_a_store_that_is_away_only_delays_the_sweep(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    upload(store, job, 1)
    driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.UPLOAD))
    store.is_down = True
    with pytest.raises(StorageError):
        sweep_lost_attempts(sweeper)
    store.is_down = False
    assert sweep_lost_attempts(sweeper) == 1
    assert store.keys == set()


@pytest.mark.req("F-06")
def test_the_objects_of_a_deleted_job_are_removed(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    store.keys.add(finish(driver, job, 1))
    assert sweep_deleted(sweeper) == 0
    driver.run(delete_job, driver.account, job.id, "user")
    assert sweep_deleted(sweeper) == 1
    assert store.keys == set()
    assert sweep_deleted(sweeper) == 0
    assert driver.sql("SELECT count(*) FROM asset WHERE deleted_at IS NULL")[0][0] == 0


@pytest.mark.req("F-06")
def test_what_a_job_deleted_in_flight_had_uploaded_is_removed_when_its_group_lets_go(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    upload(store, job, 1)
    driver.run(delete_job, driver.account, job.id, "user")
    assert sweep_lost_attempts(sweeper) == 0
    driver.run(lifecycle.finish_cancel, job.id, 1)
    assert sweep_lost_attempts(sweeper) == 1
    assert store.keys == set()
    with pytest.raises(NotFoundError):
        driver.run(queries.get_job, driver.account, job.id)


def test_the_input_of_a_deleted_job_stays_for_others_that_use_it(driver, store, sweeper):
    image = NewAsset("input", "v1/a/in/aa.png", 5, "aa" * 32, "image/png", 640, 480)
    store.keys.add(image.key)
    job = driver.submit(input=image)
    driver.run(delete_job, driver.account, job.id, "user")
    assert sweep_deleted(sweeper) == 0
    assert store.keys == {image.key}


def test_a_job_that_is_retried_keeps_what_its_new_attempt_stores(driver, store, sweeper):
    job = driver.reach(State.UPLOADING)
    upload(store, job, 1)
    driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.DEADLINE))
    driver.run(retry, driver.account, job.id)
    epoch = driver.claim().epoch
    driver.run(lifecycle.mark_running, job.id, epoch)
    driver.run(lifecycle.mark_uploading, job.id, epoch)
    current = upload(store, job, epoch)
    sweep_lost_attempts(sweeper)
    assert store.keys == current
