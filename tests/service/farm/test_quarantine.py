"""Quarantine: poison is kept with its evidence, operators put in and let out, owners wait."""

import pytest

from farm import quarantine
from farm.errors import NotFoundError, QuarantinedError
from farm.jobs import lifecycle
from farm.jobs.control import quarantine_job, retry
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State


def crash(driver, *groups):
    """Let one job crash the groups, one after the other."""
    job = driver.submit(max_attempts=5)
    for group in groups:
        driver.sql("UPDATE job SET not_before = now(), avoid_group = NULL")
        claimed = driver.claim(group)
        failure = Failure(FailureKind.CRASH, detail={"error": f"rank 0 of {group} died"})
        driver.run(lifecycle.fail, job.id, claimed.epoch, failure)
    return driver.job(job.id)


@pytest.mark.req("F-46")
@pytest.mark.parametrize("groups", [("g1", "g2"), ("g1", "g1", "g1")])
def test_poison_is_kept_with_what_its_attempts_left_behind(driver, groups):
    poison = crash(driver, *groups)
    assert (poison.state, poison.error["code"]) == (State.FAILED, "poison_job")
    (kept,) = driver.run(quarantine.list_quarantine)
    assert (kept.job_id, kept.epoch, kept.reason, kept.put_by) == (poison.id, len(groups), "poison", None)
    assert kept.evidence["crash_groups"] == sorted(set(groups))
    told = [attempt["error"]["detail"]["error"] for attempt in kept.evidence["attempts"]]
    assert told == [f"rank 0 of {group} died" for group in groups]


@pytest.mark.req("F-46")
def test_crashes_that_are_no_poison_yet_keep_nobody(driver):
    assert crash(driver, "g1", "g1").state is State.QUEUED
    assert driver.run(quarantine.list_quarantine) == []


@pytest.mark.req("F-46")
def test_poison_is_not_started_again_before_somebody_releases_it(driver):
    poison = crash(driver, "g1", "g2")
    with pytest.raises(QuarantinedError, match="an operator must release it"):
        driver.run(retry, poison.account_id, poison.id)
    driver.run(quarantine.release, poison.id, "op")
    assert driver.run(quarantine.list_quarantine) == []
    (kept,) = driver.run(quarantine.list_quarantine, with_released=True)
    assert (kept.released_by, kept.state) == ("op", "failed")
    again = driver.run(retry, poison.account_id, poison.id)
    assert (again.state, again.crash_count, again.crash_groups) == (State.QUEUED, 0, [])
    with pytest.raises(NotFoundError):
        driver.run(quarantine.release, poison.id, "op")


def test_an_operator_stops_and_keeps_a_job_in_any_state(driver):
    queued = driver.reach(State.QUEUED)
    assert driver.run(quarantine_job, queued.id, "op", "looks odd").state is State.CANCELED
    running = driver.reach(State.RUNNING)
    assert driver.run(quarantine_job, running.id, "op").cancel_requested_at is not None
    driver.run(lifecycle.finish_cancel, running.id, 1)
    failed = driver.reach(State.FAILED)
    assert driver.run(quarantine_job, failed.id, "op").state is State.FAILED
    kept = driver.run(quarantine.list_quarantine)
    assert [entry.job_id for entry in kept] == [failed.id, running.id, queued.id]
    assert kept[-1].evidence == {"note": "looks odd"}
    assert [entry.job_id for entry in driver.run(quarantine.list_quarantine, after=kept[0])] == [
        running.id,
        queued.id,
    ]
    assert driver.run(quarantine.get_quarantine, queued.id).put_by == "op"
    with pytest.raises(NotFoundError):
        driver.run(quarantine_job, "video_none", "op")
    driver.check_invariants()


def test_what_was_released_can_be_kept_again(driver):
    job = driver.reach(State.FAILED)
    driver.run(quarantine_job, job.id, "op")
    driver.run(quarantine.release, job.id, "op")
    driver.run(quarantine_job, job.id, "other")
    (kept,) = driver.run(quarantine.list_quarantine)
    assert (kept.put_by, kept.released_at) == ("other", None)
