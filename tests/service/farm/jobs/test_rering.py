"""A lost doorbell is rung again, a few times and only where somebody is idle."""

import pytest

from farm.jobs.rering import re_ring


@pytest.fixture
def waiting(driver):
    """Queue jobs that have waited for a while and whose first doorbells are sent."""

    def queue(number, **changes):
        jobs = [driver.submit(**changes) for _ in range(number)]
        for job in jobs:
            driver.age(job.id, queued_at="20 seconds", not_before="20 seconds")
        driver.sql("DELETE FROM outbox")
        return jobs

    return queue


def rung(driver):
    return [row.payload["job_id"] for row in driver.sql("SELECT payload FROM outbox")]


def test_an_idle_group_is_rung_twice_at_most_for_the_oldest_job(driver, waiting):
    driver.register("g")
    oldest, *_ = waiting(5)
    assert driver.run(re_ring) == 2
    assert rung(driver) == [oldest.id] * 2


def test_one_job_is_rung_for_once(driver, waiting):
    driver.register("g")
    (job,) = waiting(1)
    assert driver.run(re_ring) == 1
    assert rung(driver) == [job.id]


def test_two_idle_groups_are_rung_four_times(driver, waiting):
    driver.register("g1")
    driver.register("g2")
    waiting(9)
    assert driver.run(re_ring) == 4


def test_while_doorbells_wait_for_the_broker_none_are_added(driver, waiting):
    driver.register("g")
    waiting(5)
    driver.run(re_ring)
    assert driver.run(re_ring) == 0


@pytest.mark.parametrize("state", ["booting", "busy", "draining", "paused", "sick", "gone"])
def test_a_group_that_cannot_claim_is_not_rung(driver, waiting, state):
    driver.register("g", state=state)
    waiting(1)
    assert driver.run(re_ring) == 0


def test_a_group_that_holds_a_job_is_not_rung(driver, waiting):
    driver.register("g")
    waiting(2)
    driver.claim("g")
    assert driver.run(re_ring) == 0


def test_a_silent_group_is_not_rung(driver, waiting):
    driver.register("g")
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '31 seconds'")
    waiting(1)
    assert driver.run(re_ring) == 0


def test_groups_of_other_profiles_are_not_rung(driver, waiting):
    driver.register("g", "sp4")
    waiting(1)
    assert driver.run(re_ring) == 0


@pytest.mark.parametrize("column", ["queued_at", "not_before"])
def test_a_job_that_has_only_just_become_ready_is_not_rung_for(driver, waiting, column):
    driver.register("g")
    (job,) = waiting(1)
    driver.age(job.id, **{column: "5 seconds"})
    assert driver.run(re_ring) == 0
