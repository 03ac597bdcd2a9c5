"""Retention: what is over goes, objects first, whatever kills the sweep in between; the rest stays."""

from datetime import timedelta

import pytest

from farm import idempotency
from farm.assets import keep_image
from farm.db.session import make_engine
from farm.jobs.control import delete_job
from farm.jobs.job import NewAsset
from farm.jobs.states import State
from tests.service.driver import Driver
from worker import sweeps
from worker.sweeps import Sweeper, sweep_expired, sweep_retention, sweep_uploads

IMAGE = NewAsset("input", "v1/x/in/1.png", 10, "cd" * 32, "image/png", 96, 64)


class Store:
    """Remembers what was deleted; may die at a number of deletions."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.deleted: list[str] = []
        self.dies_after = dies_after

    def delete(self, key: str) -> None:
        if len(self.deleted) == self.dies_after:
            raise RuntimeError("killed")
        self.deleted.append(key)

    def abort_stale_uploads(self, older_than_s: float) -> int:
        raise AssertionError(older_than_s)


@pytest.fixture
def driver(settings):
    engine = make_engine(settings, application="test")
    yield Driver(engine)
    engine.dispose()


def sweeper(driver, store=None):
    return Sweeper(driver.engine, store or Store(), driver.rules)


def finish(driver, **past):
    """Bring a job to success, as if it had been so long ago."""
    job = driver.reach(State.SUCCEEDED)
    if past:
        driver.age(job.id, finished_at=past["ended"])
        driver.sql(
            "UPDATE job_event SET at = at - CAST(:past AS interval) WHERE job_id = :id",
            past=past["ended"],
            id=job.id,
        )
        driver.sql("UPDATE asset SET expires_at = now() - interval '1 second' WHERE job_id = :id", id=job.id)
    return job


def test_result_goes_when_its_time_is_over_and_not_before(driver):
    over, kept = finish(driver, ended="8 days"), finish(driver)
    store = Store()
    assert sweep_expired(sweeper(driver, store)) == 1
    rows = dict(driver.sql("SELECT job_id, deleted_at IS NOT NULL FROM asset"))
    assert rows == {over.id: True, kept.id: False}
    assert len(store.deleted) == 1


def test_killed_sweep_marks_nothing_that_is_still_there_and_goes_on_later(driver):
    for _ in range(3):
        finish(driver, ended="8 days")
    driver.sql("UPDATE asset SET key = key || id")
    store = Store(dies_after=2)
    with pytest.raises(RuntimeError, match="killed"):
        sweep_expired(sweeper(driver, store))
    assert driver.sql("SELECT count(*) FROM asset WHERE deleted_at IS NOT NULL")[0][0] == 0
    store.dies_after = None
    assert sweep_expired(sweeper(driver, store)) == 3
    assert len(set(store.deleted)) == 3


def test_more_than_one_batch_is_removed_in_one_run(driver, monkeypatch):
    monkeypatch.setattr(sweeps, "LIMIT", 1)
    monkeypatch.setattr("farm.retention.LIMIT", 1)
    for _ in range(3):
        finish(driver, ended="8 days")
    assert sweep_expired(sweeper(driver)) == 3


def test_image_stays_while_a_job_refers_to_it_and_goes_when_nobody_does(driver):
    used = driver.submit(input=IMAGE)
    unused = driver.run(
        keep_image, driver.account, NewAsset(**{**vars(IMAGE), "sha256": "ef" * 32, "key": "k2"})
    )
    driver.sql("UPDATE asset SET expires_at = now() - interval '2 hours'")
    store = Store()
    assert sweep_expired(sweeper(driver, store)) == 1
    assert store.deleted == ["k2"]
    driver.run(delete_job, driver.account, used.id, "user")
    assert sweep_expired(sweeper(driver, store)) == 1
    assert driver.sql("SELECT id FROM asset WHERE deleted_at IS NULL") == []
    assert sweep_retention(sweeper(driver)) == 1
    assert [row[0] for row in driver.sql("SELECT id FROM asset")] == [used.input_asset_id]
    assert unused != used.input_asset_id


def test_image_that_is_renewed_while_it_is_removed_is_not_marked(driver):
    image_id = driver.run(keep_image, driver.account, IMAGE)
    driver.sql("UPDATE asset SET expires_at = now() - interval '2 hours'")

    class Renewing(Store):
        def delete(self, key):
            super().delete(key)
            driver.run(keep_image, driver.account, IMAGE)

    sweep_expired(sweeper(driver, Renewing()))
    assert driver.sql("SELECT id FROM asset WHERE deleted_at IS NULL") == [(image_id,)]


def test_job_goes_after_ninety_days_but_never_before_its_objects(driver):
    old, young = finish(driver, ended="91 days"), finish(driver, ended="89 days")
    assert driver.sql("SELECT count(*) FROM job")[0][0] == 2
    sweep_retention(sweeper(driver))
    assert driver.sql("SELECT count(*) FROM job")[0][0] == 2  # the object is still there
    sweep_expired(sweeper(driver))
    sweep_retention(sweeper(driver))
    assert [row[0] for row in driver.sql("SELECT id FROM job")] == [young.id]
    for table in ("job_event", "job_attempt", "asset"):
        assert driver.sql(f"SELECT count(*) FROM {table} WHERE job_id = :id", id=old.id)[0][0] == 0


def test_timeline_goes_after_thirty_days_and_the_job_stays(driver):
    old, young = finish(driver, ended="31 days"), finish(driver, ended="29 days")
    sweep_retention(sweeper(driver))
    assert driver.events(old.id) == []
    assert len(driver.events(young.id)) == young.seq
    assert driver.job(old.id).state is State.SUCCEEDED


def test_answers_and_empty_batches_are_forgotten(driver):
    scope = idempotency.Scope(driver.account, "POST /v1/videos", "k", b"x")
    driver.run(idempotency.begin, scope)
    driver.sql("UPDATE idempotency_key SET created_at = now() - interval '25 hours'")
    driver.sql(
        "INSERT INTO batch (id, account_id, total, created_at) VALUES"
        " ('batch_old', :a, 1, now() - interval '91 days'), ('batch_new', :a, 1, now())",
        a=driver.account,
    )
    assert sweep_retention(sweeper(driver)) == 2
    assert driver.sql("SELECT id FROM batch") == [("batch_new",)]
    assert driver.sql("SELECT key FROM idempotency_key") == []


def test_only_uploads_that_were_begun_long_ago_are_given_up(driver, object_store, s3):
    client = s3.client()
    client.create_multipart_upload(Bucket=s3.bucket, Key=f"{s3.prefix}/v1/x")
    at = Sweeper(driver.engine, object_store, driver.rules)
    assert sweep_uploads(at) == 0
    assert object_store.abort_stale_uploads(timedelta(seconds=-60).total_seconds()) == 1
    assert object_store.abort_stale_uploads(timedelta(seconds=-60).total_seconds()) == 0
