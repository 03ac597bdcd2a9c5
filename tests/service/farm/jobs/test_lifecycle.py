"""From the heartbeat to the end: leases, success, failure, sweeps, and who wins when two come at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import text

from farm import groups
from farm.db.session import unit_of_work
from farm.errors import AlreadyFinishedError
from farm.jobs import lifecycle
from farm.jobs.control import delete_job, request_cancel
from farm.jobs.job import NewAsset, Rules
from farm.jobs.lifecycle import Result
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State
from tests.service.driver import GROUP, RESULT, VIDEO, in_threads

NUM_RACES = 15


def beat(driver, job_id, epoch=1, progress=None, group=GROUP):
    return driver.run(lifecycle.beat, job_id, epoch, group, progress, rules=driver.rules)


def lose_lease(driver, job_id):
    driver.age(job_id, lease_until="1 second")


def race(*acts):
    """Run functions that start at the same instant; return their answers."""
    barrier = threading.Barrier(len(acts))

    def start(act):
        barrier.wait()
        return act()

    return in_threads([lambda act=act: start(act) for act in acts])


def test_a_beat_extends_the_lease_and_stores_the_progress(driver):
    job = driver.reach(State.RUNNING)
    driver.age(job.id, lease_until="1 second")
    answer = beat(driver, job.id, progress=Progress("denoise", 2, 4))
    after = driver.job(job.id)
    assert after.lease_until - job.lease_until > timedelta(seconds=-1)
    assert (after.phase, after.step, after.progress) == ("denoise", 2, 47)
    assert (answer.cancel_requested, answer.deadline_passed, answer.wanted_state) == (False, False, None)
    assert answer.lease_s == 30


def test_step_counts_denoising_and_never_passes_the_jobs_steps(driver):
    job = driver.reach(State.RUNNING)
    seen = []
    for progress in Progress("image_encode", 1, 1), Progress("denoise", 2, 4), Progress("mux", 1, 9):
        beat(driver, job.id, progress=progress)
        seen.append(driver.job(job.id).step)
    assert seen == [0, 2, driver.job(job.id).steps]


def test_progress_never_falls_within_an_attempt(driver):
    job = driver.reach(State.RUNNING)
    beat(driver, job.id, progress=Progress("denoise", 4, 4))
    beat(driver, job.id, progress=Progress("text_encode"))
    assert driver.job(job.id).progress == 90


def test_a_beat_without_news_leaves_the_progress_alone(driver):
    job = driver.reach(State.RUNNING)
    beat(driver, job.id, progress=Progress("denoise", 2, 4))
    beat(driver, job.id)
    assert driver.job(job.id).step == 2


def test_a_beat_is_no_event(driver):
    job = driver.reach(State.RUNNING)
    beat(driver, job.id, progress=Progress("denoise", 2, 4))
    assert driver.job(job.id).seq == job.seq


def test_a_beat_tells_of_cancel_deadline_and_what_is_wanted_of_the_group(driver):
    driver.register()
    job = driver.reach(State.RUNNING)
    driver.age(job.id, attempt_deadline="1 second")
    driver.sql("UPDATE worker_group SET wanted_state = 'draining'")
    driver.run(request_cancel, driver.account, job.id, "user")
    answer = beat(driver, job.id)
    assert (answer.cancel_requested, answer.deadline_passed, answer.wanted_state) == (True, True, "draining")


def test_a_beat_of_another_group_is_refused(driver):
    job = driver.reach(State.RUNNING)
    assert beat(driver, job.id, group="group-b") is None


def test_success_stores_result_objects_and_figures_together(driver):
    job = driver.reach(State.UPLOADING, retention_s=3600)
    thumb = NewAsset("thumb", "v1/x/thumb.jpg", 3, "cd" * 32, "image/jpeg", 224, 128)
    result = Result({"bytes": 10}, [VIDEO, thumb], {"denoise": 1.5}, 1234)
    assert driver.run(lifecycle.succeed, job.id, 1, result)
    after = driver.job(job.id)
    assert (after.state, after.progress, after.phase, after.result) == (
        State.SUCCEEDED,
        100,
        None,
        {"bytes": 10},
    )
    assert (after.error, after.lease_until) == (None, None)
    assets = driver.sql("SELECT * FROM asset ORDER BY kind")
    assert [(row.kind, row.key, row.job_id, row.epoch) for row in assets] == [
        ("thumb", thumb.key, job.id, 1),
        ("video", VIDEO.key, job.id, 1),
    ]
    for row in assets:
        assert abs(row.expires_at - after.finished_at - timedelta(hours=1)) < timedelta(seconds=5)
    (attempt,) = driver.attempts(job.id)
    assert (attempt.outcome, attempt.timings, attempt.peak_memory_mb) == ("succeeded", {"denoise": 1.5}, 1234)
    assert driver.usage() == (0, 0)


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING])
def test_a_job_cannot_succeed_before_its_upload(driver, state):
    job = driver.reach(state)
    before = driver.everything()
    assert not driver.run(lifecycle.succeed, job.id, 1, RESULT)
    assert driver.everything() == before


@pytest.mark.req("F-05")
def test_a_cancel_that_came_first_discards_the_output(driver):
    job = driver.reach(State.UPLOADING)
    driver.run(request_cancel, driver.account, job.id, "user")
    assert not driver.run(lifecycle.succeed, job.id, 1, RESULT)
    after = driver.job(job.id)
    assert (after.state, after.error["code"], after.result) == (State.CANCELED, "canceled", None)
    assert driver.sql("SELECT id FROM asset") == []


@pytest.mark.req("F-05")
def test_success_and_cancel_at_the_same_time_have_one_winner(driver):
    def cancel(job_id):
        try:
            return driver.run(request_cancel, driver.account, job_id, "user")
        except AlreadyFinishedError as refused:
            return refused

    winners = set()
    for _ in range(NUM_RACES):
        job = driver.reach(State.UPLOADING)
        succeeded, canceled = race(
            lambda job=job: driver.run(lifecycle.succeed, job.id, 1, RESULT), lambda job=job: cancel(job.id)
        )
        after = driver.job(job.id)
        winners.add(after.state)
        if succeeded:
            assert after.state is State.SUCCEEDED
            assert isinstance(canceled, AlreadyFinishedError)
            assert canceled.http_status == 409
        else:
            assert after.state is State.CANCELED
            assert driver.sql("SELECT id FROM asset WHERE job_id = :id", id=job.id) == []
        driver.check_invariants()
    assert winners <= {State.SUCCEEDED, State.CANCELED}


@pytest.mark.req("F-06")
def test_a_deleted_job_that_finishes_stays_hidden_and_keeps_no_object(driver):
    job = driver.reach(State.UPLOADING)
    driver.run(delete_job, driver.account, job.id, "user")
    assert not driver.run(lifecycle.succeed, job.id, 1, RESULT)
    after = driver.job(job.id)
    assert after.state is State.CANCELED
    assert after.deleted_at is not None
    assert driver.sql("SELECT id FROM asset") == []


def test_a_failure_keeps_its_evidence_with_the_attempt_and_a_safe_sentence_on_the_job(driver):
    job = driver.reach(State.RUNNING)
    failure = Failure(FailureKind.INVALID_INPUT, "prompt is too long", {"log": ["/opt/model failed"]})
    failed = driver.run(lifecycle.fail, job.id, 1, failure)
    assert failed.state is State.FAILED
    assert failed.error == {"code": "invalid_input", "message": "prompt is too long", "retryable": False}
    assert failed.finished_at is not None
    (attempt,) = driver.attempts(job.id)
    assert (attempt.outcome, attempt.error["code"], attempt.error["detail"]) == (
        "failed",
        "invalid_input",
        {"log": ["/opt/model failed"]},
    )
    assert driver.events(job.id)[-1].data == {
        "from": "running",
        "failure": "invalid_input",
        "code": "invalid_input",
    }


def test_a_crash_comes_back_after_its_backoff(driver):
    job = driver.reach(State.RUNNING)
    again = driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.CRASH), jitter=0)
    (attempt,) = driver.attempts(job.id)
    assert again.state is State.QUEUED
    assert again.not_before - attempt.ended_at == timedelta(seconds=10)
    assert again.queue_deadline - attempt.ended_at == timedelta(seconds=job.expires_in_s)
    assert (again.crash_count, again.crash_groups) == (1, [GROUP])
    assert driver.usage() == (1, 0)


@pytest.mark.req("F-46")
def test_a_job_that_crashes_two_groups_is_poison(driver):
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.CRASH))
    driver.age(job.id, not_before="1 second")
    second = driver.claim("group-b")
    failed = driver.run(lifecycle.fail, job.id, second.epoch, Failure(FailureKind.CRASH))
    assert (failed.state, failed.error["code"]) == (State.FAILED, "poison_job")
    assert failed.crash_groups == ["group-a", "group-b"]


def test_out_of_memory_moves_the_job_and_says_so_in_its_timeline(driver):
    job = driver.reach(State.RUNNING)
    failure = Failure(FailureKind.OUT_OF_MEMORY, roomier_profile="layerwise-1gpu")
    moved = driver.run(lifecycle.fail, job.id, 1, failure)
    assert (moved.state, moved.profile) == (State.QUEUED, "layerwise-1gpu")
    data = driver.events(job.id)[-1].data
    assert (data["rerouted_from"], data["rerouted_to"]) == ("tiny-cpu", "layerwise-1gpu")
    assert driver.claim(profile="layerwise-1gpu").epoch == 2


def test_a_released_job_goes_before_what_was_queued_after_it(driver):
    job = driver.reach(State.RUNNING)
    driver.submit()
    released = driver.run(lifecycle.release, job.id, 1)
    assert (released.preemptions, released.attempts_used) == (1, 0)
    assert driver.claim().job.id == job.id


def test_a_job_to_be_canceled_is_not_put_back_by_any_failure(driver):
    for kind in FailureKind:
        job = driver.reach(State.RUNNING)
        driver.run(request_cancel, driver.account, job.id, "user")
        assert driver.run(lifecycle.fail, job.id, 1, Failure(kind)).state is State.CANCELED


def test_nothing_is_canceled_that_nobody_asked_for(driver):
    job = driver.reach(State.RUNNING)
    assert driver.run(lifecycle.finish_cancel, job.id, 1) is None
    driver.run(request_cancel, driver.account, job.id, "user")
    canceled = driver.run(lifecycle.finish_cancel, job.id, 1)
    assert (canceled.state, canceled.cancel_by) == (State.CANCELED, "user")


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.UPLOADING])
def test_expired_lease_returns_job_to_queue(driver, state):
    job = driver.reach(state)
    lose_lease(driver, job.id)
    assert driver.run(lifecycle.reap_leases) == 1
    after = driver.job(job.id)
    assert (after.state, after.infra_losses, after.group_id) == (State.QUEUED, 1, None)
    assert driver.claim("group-b").epoch == 2
    driver.check_invariants()


def test_a_live_lease_is_left_alone(driver):
    driver.reach(State.RUNNING)
    before = driver.everything()
    assert driver.run(lifecycle.reap_leases) == 0
    assert driver.everything() == before


def test_a_lost_lease_with_a_cancel_pending_ends_the_job(driver):
    job = driver.reach(State.RUNNING)
    driver.run(request_cancel, driver.account, job.id, "user")
    lose_lease(driver, job.id)
    driver.run(lifecycle.reap_leases)
    assert driver.job(job.id).state is State.CANCELED


def test_more_lost_leases_than_the_cap_fail_the_job(driver):
    driver.rules = Rules(max_infra_losses=2)
    job = driver.reach(State.STARTING)
    for _ in range(3):
        lose_lease(driver, job.id)
        driver.run(lifecycle.reap_leases, rules=driver.rules)
        driver.age(job.id, not_before="1 second")
        driver.claim()
    after = driver.job(job.id)
    assert (after.state, after.error["code"], after.epoch) == (State.FAILED, "worker_lost", 3)


def test_a_lost_lease_past_the_deadline_fails_for_the_deadline(driver):
    job = driver.reach(State.RUNNING)
    driver.age(job.id, lease_until="1 second", attempt_deadline="1 second")
    driver.run(lifecycle.reap_leases)
    assert driver.job(job.id).error["code"] == "deadline_exceeded"


def test_an_agent_that_ignores_the_deadline_is_overruled_after_some_grace(driver):
    job = driver.reach(State.RUNNING)
    driver.age(job.id, attempt_deadline="60 seconds")
    assert driver.run(lifecycle.reap_leases) == 0
    driver.age(job.id, attempt_deadline="121 seconds")
    assert driver.run(lifecycle.reap_leases) == 1
    assert driver.job(job.id).error["code"] == "deadline_exceeded"


def test_one_sweep_takes_a_limited_number(driver):
    for _ in range(5):
        driver.submit()
    for number in range(5):
        lose_lease(driver, driver.claim(f"group-{number}").job.id)
    assert driver.run(lifecycle.reap_leases, limit=3) == 3
    assert driver.run(lifecycle.reap_leases, limit=3) == 2


def test_a_beat_and_the_reaper_at_the_same_time_agree_on_who_holds_the_job(driver):
    for _ in range(NUM_RACES):
        job = driver.reach(State.RUNNING)
        lose_lease(driver, job.id)
        answer, num_reaped = race(
            lambda job=job: beat(driver, job.id), lambda: driver.run(lifecycle.reap_leases)
        )
        after = driver.job(job.id)
        assert (answer is not None, num_reaped) in {(True, 0), (False, 1)}
        assert after.state is (State.RUNNING if answer else State.QUEUED)
        driver.wipe()


def test_two_reapers_at_the_same_time_take_each_job_once(driver):
    accounts = [driver.new_account() for _ in range(3)]
    for account in accounts:
        for _ in range(4):
            driver.submit(account)
    while (claimed := driver.claim()) is not None:
        lose_lease(driver, claimed.job.id)
    taken = race(*[lambda: driver.run(lifecycle.reap_leases)] * 4)
    assert sum(taken) == 12
    assert driver.sql("SELECT DISTINCT infra_losses FROM job") == [(1,)]
    driver.check_invariants()


def test_a_job_that_waited_for_too_long_expires(driver):
    driver.register()
    job = driver.submit()
    driver.age(job.id, queue_deadline="1 second")
    fresh = driver.submit()
    assert driver.run(lifecycle.expire_queued) == 1
    after = driver.job(job.id)
    assert (after.state, after.error["code"]) == (State.EXPIRED, "expired")
    assert driver.job(fresh.id).state is State.QUEUED
    assert driver.usage() == (1, 0)


def test_a_job_whose_profile_nobody_serves_expires_with_that_reason(driver):
    driver.register("group-x", "sp4")
    job = driver.submit()
    driver.age(job.id, queue_deadline="1 second")
    driver.run(lifecycle.expire_queued)
    assert driver.job(job.id).error["code"] == "profile_unavailable"


def test_groups_that_went_silent_do_not_serve_their_profile(driver):
    driver.register()
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '31 seconds'")
    assert driver.run(groups.mark_gone) == 1
    job = driver.submit()
    driver.age(job.id, queue_deadline="1 second")
    driver.run(lifecycle.expire_queued)
    assert driver.job(job.id).error["code"] == "profile_unavailable"


@pytest.mark.parametrize("sweep", [lifecycle.reap_leases, lifecycle.expire_queued])
def test_sweeps_lock_accounts_in_the_order_of_their_ids_so_that_they_cannot_deadlock(driver, sweep):
    first, second = sorted([driver.new_account(), driver.new_account()])
    # The older job, which every other order would treat first, belongs to the account with the higher id.
    for account in (second, first):
        job = driver.submit(account)
        time.sleep(0.002)
        if sweep is lifecycle.reap_leases:
            driver.claim()
        driver.age(
            job.id, **{"lease_until" if sweep is lifecycle.reap_leases else "queue_deadline": "1 second"}
        )
    with ThreadPoolExecutor(1) as pool:
        with unit_of_work(driver.engine) as conn:
            conn.execute(text("SELECT 1 FROM account_usage WHERE account_id = :id FOR UPDATE"), {"id": first})
            waiting = pool.submit(driver.run, sweep)
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while driver.sql(f"{waits} AND datname = current_database()") == []:
                assert not waiting.done()
            driver.sql("SELECT 1 FROM account_usage WHERE account_id = :id FOR UPDATE NOWAIT", id=second)
        assert waiting.result() == 2
