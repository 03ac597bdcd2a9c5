"""The relay: all is published at least once, nothing before its commit, and an outage changes nothing."""

import threading

import pytest
from sqlalchemy import text

from farm.db.session import unit_of_work
from farm.jobs.job import Rules
from farm.jobs.submit import submit
from farm.outbox import PublishError, has_unsent, purge_sent, relay_once
from tests.service.driver import in_threads


class Broker:
    """Remembers what it was given; refuses while it is down."""

    def __init__(self):
        self.rung = []
        self.is_down = False

    def publish(self, job_id, profile):
        if self.is_down:
            raise PublishError("the broker is away")
        self.rung.append((job_id, profile))


@pytest.fixture
def broker():
    return Broker()


def unsent(driver):
    return driver.sql("SELECT * FROM outbox WHERE sent_at IS NULL ORDER BY id")


@pytest.mark.req("F-40")
def test_what_is_committed_is_published_once(driver, broker):
    jobs = [driver.submit().id for _ in range(3)]
    assert relay_once(driver.engine, broker.publish) == 3
    assert relay_once(driver.engine, broker.publish) == 0
    assert broker.rung == [(job_id, "tiny-cpu") for job_id in jobs]
    assert unsent(driver) == []


@pytest.mark.req("F-40")
def test_what_is_not_committed_is_not_published(driver, broker):
    with unit_of_work(driver.engine) as conn:
        submit(conn, driver.submission())
        assert relay_once(driver.engine, broker.publish) == 0
    assert relay_once(driver.engine, broker.publish) == 1


def test_rows_that_commit_out_of_order_are_all_found(driver, broker):
    with unit_of_work(driver.engine) as conn:
        early = submit(conn, driver.submission(account_id=driver.new_account()))
        late = driver.submit()
        relay_once(driver.engine, broker.publish)
    relay_once(driver.engine, broker.publish)
    assert [job_id for job_id, _ in broker.rung] == [late.id, early.id]


def test_an_outage_keeps_the_rows_with_the_reason_and_ends_at_the_first_failure(driver, broker):
    for _ in range(3):
        driver.submit()
    broker.is_down = True
    assert relay_once(driver.engine, broker.publish) == 0
    rows = unsent(driver)
    assert [row.attempts for row in rows] == [1, 0, 0]
    assert rows[0].error == "the broker is away"
    assert all(row.locked_until is None for row in rows)
    assert driver.run(has_unsent)
    broker.is_down = False
    assert relay_once(driver.engine, broker.publish) == 3
    assert not driver.run(has_unsent)


def test_a_broker_that_fails_half_way_gets_the_rest_later(driver, broker):
    jobs = [driver.submit().id for _ in range(4)]

    def publish(job_id, profile):
        broker.is_down = len(broker.rung) == 2
        broker.publish(job_id, profile)

    assert relay_once(driver.engine, publish) == 2
    assert relay_once(driver.engine, broker.publish) == 0
    broker.is_down = False
    assert relay_once(driver.engine, broker.publish) == 2
    assert [job_id for job_id, _ in broker.rung] == jobs


def test_a_relay_that_is_killed_while_it_publishes_sends_again_after_its_lease(driver, broker):
    driver.submit()

    def die(job_id, profile):
        broker.publish(job_id, profile)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        relay_once(driver.engine, die)
    assert relay_once(driver.engine, broker.publish) == 0
    driver.sql("UPDATE outbox SET locked_until = now() - interval '1 second'")
    assert relay_once(driver.engine, broker.publish) == 1
    assert len(broker.rung) == 2


def test_no_transaction_is_open_while_the_broker_is_asked(driver):
    driver.submit()
    open_ones = []

    def publish(_job_id, _profile):
        query = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        open_ones.append(driver.sql(f"{query} AND datname = current_database()")[0][0])

    relay_once(driver.engine, publish)
    assert open_ones == [0]


def test_rows_that_another_relay_is_taking_are_not_waited_for(driver, broker):
    taken, free = driver.submit(), driver.submit()
    with unit_of_work(driver.engine) as conn:
        row = text("SELECT 1 FROM outbox WHERE payload->>'job_id' = :id FOR UPDATE")
        conn.execute(row, {"id": taken.id})
        assert relay_once(driver.engine, broker.publish) == 1
    assert broker.rung == [(free.id, "tiny-cpu")]


def test_relays_at_the_same_time_share_the_rows(driver, broker):
    driver.rules = Rules(max_queued=500)
    jobs = sorted(driver.submit().id for _ in range(150))
    lock = threading.Lock()

    def publish(job_id, profile):
        with lock:
            broker.publish(job_id, profile)

    sent = in_threads([lambda: relay_once(driver.engine, publish)] * 4)
    assert sum(sent) == 150
    assert sorted(job_id for job_id, _ in broker.rung) == jobs


def test_rows_go_an_hour_after_they_were_sent(driver, broker):
    for _ in range(3):
        driver.submit()
    relay_once(driver.engine, broker.publish)
    driver.submit()
    driver.sql(
        "UPDATE outbox SET sent_at = now() - interval '61 minutes' WHERE id = (SELECT min(id) FROM outbox)"
    )
    assert driver.run(purge_sent) == 1
    assert driver.sql("SELECT count(*) FROM outbox")[0][0] == 3
