"""Cancel, delete and retry, from every state and of every account."""

from datetime import timedelta

import pytest

from farm import quarantine
from farm.errors import AlreadyFinishedError, NotFoundError, NotRetryableError, QueueFullError
from farm.jobs import lifecycle
from farm.jobs.control import Again, delete_job, request_cancel, retry
from farm.jobs.job import Rules
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.queries import get_job
from farm.jobs.states import ACTIVE, RETRYABLE, TERMINAL, State


def cancel(driver, job):
    return driver.run(request_cancel, driver.account, job.id, "user")


def delete(driver, job):
    return driver.run(delete_job, driver.account, job.id, "user")


def again(driver, job, **options):
    return driver.run(retry, driver.account, job.id, Again(**options), rules=driver.rules)


@pytest.mark.req("F-05")
def test_a_queued_job_is_canceled_at_once(driver):
    canceled = cancel(driver, driver.submit())
    assert (canceled.state, canceled.error["code"], canceled.cancel_by) == (
        State.CANCELED,
        "canceled",
        "user",
    )
    assert driver.usage() == (0, 0)
    assert driver.claim() is None


@pytest.mark.parametrize("state", sorted(ACTIVE))
def test_an_active_job_is_asked_to_stop_once(driver, state):
    job = driver.reach(state)
    asked = cancel(driver, job)
    assert (asked.state, asked.seq) == (state, job.seq + 1)
    assert asked.cancel_requested_at is not None
    assert driver.events(job.id)[-1].type == "cancel_requested"
    assert cancel(driver, job) == asked


@pytest.mark.req("F-05")
@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_finished_job_cannot_be_canceled(driver, state):
    job = driver.reach(state)
    with pytest.raises(AlreadyFinishedError, match=state):
        cancel(driver, job)


@pytest.mark.parametrize("act", [request_cancel, delete_job])
def test_a_job_of_another_account_does_not_exist(driver, act):
    job = driver.submit(driver.new_account())
    with pytest.raises(NotFoundError):
        driver.run(act, driver.account, job.id, "user")
    assert driver.job(job.id).state is State.QUEUED


@pytest.mark.req("F-06")
@pytest.mark.parametrize("state", State)
def test_a_job_in_any_state_can_be_deleted_and_is_gone_at_once(driver, state):
    job = driver.reach(state)
    delete(driver, job)
    with pytest.raises(NotFoundError):
        driver.run(get_job, driver.account, job.id)
    with pytest.raises(NotFoundError):
        delete(driver, job)
    after = driver.job(job.id)
    assert after.state is (State.CANCELED if state is State.QUEUED else state)
    assert (after.cancel_requested_at is not None) == (state in ACTIVE | {State.QUEUED, State.CANCELED})
    assert driver.events(job.id)[-1].type == "deleted"
    driver.check_invariants()


@pytest.mark.req("F-06")
def test_a_deleted_job_can_be_neither_canceled_nor_retried(driver):
    job = driver.reach(State.FAILED)
    delete(driver, job)
    for act in (cancel, again):
        with pytest.raises(NotFoundError):
            act(driver, job)


@pytest.mark.parametrize("state", sorted(RETRYABLE))
def test_a_retry_queues_the_same_job_with_a_new_budget(driver, state):
    job = driver.reach(state)
    queued = again(driver, job)
    assert (queued.id, queued.state, queued.retry_count) == (job.id, State.QUEUED, 1)
    assert (queued.params, queued.seed, queued.profile, queued.priority) == (
        job.params,
        job.seed,
        job.profile,
        job.priority,
    )
    assert (queued.error, queued.finished_at, queued.cancel_requested_at, queued.cancel_by) == (None,) * 4
    assert (queued.epoch, queued.attempts) == (job.epoch, 0)
    assert queued.queued_at > job.queued_at
    assert queued.rank_at == queued.queued_at
    assert queued.queue_deadline - queued.queued_at == timedelta(seconds=job.expires_in_s)
    assert driver.usage() == (1, 0)
    driver.check_invariants()


def test_a_retried_job_goes_on_with_the_next_epoch(driver):
    job = driver.reach(State.FAILED)
    again(driver, job)
    assert driver.claim().epoch == 2


def test_a_retry_forgets_the_failures_before_it(driver):
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.CRASH))
    driver.age(job.id, not_before="1 second")
    driver.claim("group-b")
    driver.run(lifecycle.fail, job.id, 2, Failure(FailureKind.CRASH))
    driver.run(quarantine.release, job.id, "operator")
    queued = again(driver, job)
    assert (queued.crash_count, queued.crash_groups, queued.attempts_used) == (0, [], 0)
    assert driver.claim("group-a") is not None


@pytest.mark.parametrize("state", sorted(set(State) - RETRYABLE))
def test_a_job_that_runs_waits_or_succeeded_cannot_be_retried(driver, state):
    job = driver.reach(state)
    with pytest.raises(NotRetryableError, match=state):
        again(driver, job)
    assert driver.job(job.id) == job


def test_a_retry_may_change_seed_priority_and_profile(driver):
    queued = again(driver, driver.reach(State.FAILED), seed=99, priority=4, profile="sp4")
    assert (queued.seed, queued.params["seed"], queued.prompt) == (99, 99, queued.params["prompt"])
    assert (queued.priority, queued.profile, queued.requested_profile) == (4, "sp4", "sp4")
    assert queued.queued_at - queued.rank_at == timedelta(minutes=40)


@pytest.mark.req("F-12")
def test_a_retry_needs_room_in_the_queue(driver):
    driver.rules = Rules(max_queued=1)
    job = driver.reach(State.FAILED)
    driver.submit()
    with pytest.raises(QueueFullError):
        again(driver, job)
    assert driver.job(job.id).state is State.FAILED
    driver.check_invariants()
