"""The sweeps: each under its own lock, each until nothing is left, none in the way of another."""

import pytest
import structlog
from sqlalchemy import func, select

from farm.db.session import make_engine, unit_of_work
from farm.jobs.lifecycle import SWEEP_LIMIT
from farm.jobs.states import State
from tests.service.driver import Driver, in_threads
from worker.sweeps import LOCK_SPACE, SWEEPS, Sweeper, sweep_history, sweep_leases, sweep_ttl, sweep_usage

BY_NAME = {sweep.name: (number, sweep) for number, sweep in enumerate(SWEEPS)}


class NoStore:
    """A store that must not be asked."""

    def delete(self, key):
        raise AssertionError(f"{key} was deleted")


@pytest.fixture
def driver(settings):
    engine = make_engine(settings, application="test", pool_size=10)
    yield Driver(engine)
    engine.dispose()


@pytest.fixture
def sweeper(driver):
    return Sweeper(driver.engine, NoStore(), driver.rules)


def make_overdue(driver):
    """Leave something to do for each sweep that takes a lock."""
    driver.register("silent")
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '1 minute'")
    driver.register("idle")
    lost = driver.reach(State.RUNNING)
    driver.age(lost.id, lease_until="1 second")
    expired = driver.submit()
    driver.age(expired.id, queue_deadline="1 second")
    waiting = driver.submit()
    driver.age(waiting.id, queued_at="1 minute", not_before="1 minute")
    driver.sql("UPDATE outbox SET sent_at = now() - interval '2 hours'")
    driver.sql("UPDATE account_usage SET queued = queued + 1")
    driver.sql(
        "INSERT INTO webhook_message (id, account_id, type, body, created_at)"
        " VALUES ('evt_0', :account, 'webhook.test', '{}', now() - interval '31 days')",
        account=driver.account,
    )


LOCKED = ["leases", "ttl", "rering", "groups", "usage", "outbox", "webhooks"]


@pytest.mark.parametrize("name", LOCKED)
def test_a_sweep_does_its_work_only_while_no_other_ticker_does(driver, sweeper, name):
    make_overdue(driver)
    number, sweep = BY_NAME[name]
    before = driver.everything()
    with unit_of_work(driver.engine) as conn:
        conn.execute(select(func.pg_advisory_xact_lock(LOCK_SPACE, number)))
        assert sweep.run(sweeper) == 0
        assert driver.everything() == before
    assert sweep.run(sweeper) > 0
    assert sweep.run(sweeper) == 0


def test_the_lock_of_one_sweep_does_not_stop_another(driver, sweeper):
    make_overdue(driver)
    with unit_of_work(driver.engine) as conn:
        conn.execute(select(func.pg_advisory_xact_lock(LOCK_SPACE, BY_NAME["ttl"][0])))
        assert sweep_leases(sweeper) == 1


def test_one_run_goes_on_until_nothing_is_left(driver, sweeper):
    number = SWEEP_LIMIT + 5
    job = driver.submit()
    columns = [
        row[0]
        for row in driver.sql(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'job'::regclass"
            " AND attnum > 0 AND attname <> 'id'"
        )
    ]
    driver.sql(
        f"INSERT INTO job (id, {', '.join(columns)})"
        f" SELECT 'copy-' || n, {', '.join(columns)} FROM job, generate_series(2, {number}) n"
    )
    driver.sql(f"UPDATE account_usage SET queued = {number}")
    driver.sql("UPDATE job SET queue_deadline = now() - interval '1 second'")
    assert sweep_ttl(sweeper) == number
    assert driver.usage() == (0, 0)
    assert driver.job(job.id).state is State.EXPIRED


def test_sweeps_of_two_tickers_at_the_same_time_do_all_the_work_once(driver, sweeper):
    for _ in range(8):
        driver.submit(driver.new_account())
    while (claimed := driver.claim()) is not None:
        driver.age(claimed.job.id, lease_until="1 second")
    assert sum(in_threads([lambda: sweep_leases(sweeper)] * 3)) == 8
    driver.check_invariants()


def test_a_miscount_is_mended_and_logged_as_an_error(driver, sweeper):
    driver.submit()
    driver.sql("UPDATE account_usage SET queued = 5")
    with structlog.testing.capture_logs() as lines:
        assert sweep_usage(sweeper) == 1
    (line,) = [line for line in lines if line["event"] == "usage_miscounted"]
    assert (line["log_level"], line["account"], line["was"], line["counted"]) == (
        "error",
        driver.account,
        (5, 0, 0),
        (1, 0, 0),
    )
    assert driver.usage() == (1, 0)


def test_sweeps_run_as_often_as_documented():
    assert {name: sweep.every_s for name, (_, sweep) in BY_NAME.items()} == {
        "leases": 5,
        "ttl": 10,
        "rering": 10,
        "groups": 10,
        "usage": 600,
        "lost_attempts": 600,
        "deleted": 600,
        "outbox": 3600,
        "webhooks": 600,
        "expired": 600,
        "retention": 600,
        "uploads": 3600,
        "spill": 60,
        "waves": 5,
        "history": 60,
    }


def samples(driver):
    return driver.sql("SELECT queued, groups_up, groups_busy, outbox_lag_s FROM farm_sample ORDER BY at")


def test_the_farm_is_written_down_once_a_minute_whoever_does_it(driver, sweeper):
    driver.register("silent", state="busy")
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '1 minute'")
    driver.register("idle")
    driver.register("works", state="busy")
    for _ in range(3):
        driver.submit()
    driver.sql("UPDATE outbox SET created_at = now() - interval '90 seconds'")
    in_threads([lambda: sweep_history(sweeper)] * 3)
    driver.sql("UPDATE farm_sample SET at = date_trunc('minute', now())")  # the minute may end here
    sweep_history(sweeper)
    first = samples(driver)[0]
    assert tuple(first)[:3] == (3, 2, 1)
    assert first.outbox_lag_s >= 90
    assert driver.sql("SELECT count(DISTINCT at) = count(*), count(*) <= 2 FROM farm_sample") == [
        (True, True)
    ]


def test_samples_are_kept_for_two_days_only(driver, sweeper):
    driver.sql(
        "INSERT INTO farm_sample SELECT date_trunc('minute', now()) - n * interval '1 minute', 0, 0, 0, 0"
        " FROM generate_series(1, 4000) n"
    )
    sweep_history(sweeper)
    [(num, is_old)] = driver.sql(
        "SELECT count(*), bool_or(at < now() - interval '49 hours') FROM farm_sample"
    )
    assert 2878 <= num <= 2882
    assert is_old is False


def test_a_sample_is_taken_only_while_no_other_ticker_takes_it(driver, sweeper):
    with unit_of_work(driver.engine) as conn:
        conn.execute(select(func.pg_advisory_xact_lock(LOCK_SPACE, BY_NAME["history"][0])))
        assert sweep_history(sweeper) == 0
    assert samples(driver) == []
    assert sweep_history(sweeper) == 1
