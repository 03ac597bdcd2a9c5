"""The one writer of state: every edge, every refusal, the fence, and what is written along with a move."""

import pytest
from sqlalchemy.exc import DBAPIError

from farm.clock import db_after
from farm.jobs import lifecycle
from farm.jobs.control import request_cancel
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind, error_of
from farm.jobs.states import ACTIVE, EDGES, State
from farm.jobs.transition import lock_job, record_event, transition
from tests.service.driver import GROUP, RESULT


def columns_for(to):
    if to is State.STARTING:
        return {"lease_until": db_after(30), "group_id": GROUP, "attempt": {"worker_boot_id": "boot"}}
    return {"error": error_of("canceled")} if to in {State.FAILED, State.CANCELED, State.EXPIRED} else {}


@pytest.mark.req("F-01")
@pytest.mark.parametrize("start", State)
def test_each_edge_is_taken_and_every_other_move_is_refused_without_a_trace(driver, start):
    for to in State:
        job = driver.reach(start)
        before = driver.everything()
        moved = driver.run(transition, job.id, to=to, **columns_for(to))
        if to in EDGES[start]:
            assert moved is not None
            assert driver.job(job.id).state is to
        else:
            assert moved is None
            assert driver.everything() == before
        driver.wipe()


@pytest.mark.req("F-01")
@pytest.mark.parametrize("column", ["state = 'succeeded'", "state = 'running'", "epoch = 7", "seq = 9"])
def test_the_guard_of_the_tests_refuses_a_write_past_the_function(driver, column):
    driver.submit()
    with pytest.raises(DBAPIError, match="guard"):
        driver.sql(f"UPDATE job SET {column}")


def test_a_narrower_choice_of_starts_is_obeyed(driver):
    job = driver.reach(State.QUEUED)
    only_active = driver.run(transition, job.id, to=State.CANCELED, from_states=ACTIVE)
    assert only_active is None


def test_an_unknown_job_moves_nowhere(driver):
    assert driver.run(transition, "video_unknown", to=State.CANCELED) is None


FENCED = {
    "beat": lambda epoch: (lifecycle.beat, (epoch, GROUP, Progress("denoise", 3, 4))),
    "mark_running": lambda epoch: (lifecycle.mark_running, (epoch,)),
    "mark_uploading": lambda epoch: (lifecycle.mark_uploading, (epoch,)),
    "succeed": lambda epoch: (lifecycle.succeed, (epoch, RESULT)),
    "fail": lambda epoch: (lifecycle.fail, (epoch, Failure(FailureKind.CRASH))),
    "release": lambda epoch: (lifecycle.release, (epoch,)),
    "finish_cancel": lambda epoch: (lifecycle.finish_cancel, (epoch,)),
}
# The state in which the write would be accepted from the epoch that holds the job.
ACCEPTED_IN = {"mark_running": State.STARTING, "mark_uploading": State.RUNNING, "succeed": State.UPLOADING}


def write_as(driver, write, job, epoch):
    act, args = FENCED[write](epoch)
    return driver.run(act, job.id, *args)


@pytest.mark.req("F-02")
def test_a_write_of_another_epoch_changes_nothing(driver):
    for write in FENCED:
        job = driver.reach(ACCEPTED_IN.get(write, State.RUNNING))
        if write == "finish_cancel":
            driver.sql("UPDATE job SET cancel_requested_at = now()")
        before = driver.everything()
        for epoch in (0, 2, 99):
            assert not write_as(driver, write, job, epoch), write
            assert driver.everything() == before, write
        assert write_as(driver, write, job, 1), write
        assert driver.everything() != before, write
        driver.wipe()


@pytest.mark.req("F-02")
@pytest.mark.parametrize("end", [State.SUCCEEDED, State.FAILED, State.QUEUED])
def test_a_late_write_of_the_epoch_that_ended_changes_nothing(driver, end):
    job = driver.reach(State.RUNNING if end is State.QUEUED else end)
    if end is State.QUEUED:
        driver.run(lifecycle.release, job.id, 1)
    before = driver.everything()
    for write in FENCED:
        is_repeat = (write, end) == ("succeed", State.SUCCEEDED)
        assert bool(write_as(driver, write, job, 1)) == is_repeat, write
        assert driver.everything() == before, write


@pytest.mark.req("F-02")
@pytest.mark.parametrize("write", ACCEPTED_IN)
def test_a_move_whose_answer_was_lost_is_confirmed_to_its_epoch_alone(driver, write):
    job = driver.reach(ACCEPTED_IN[write])
    assert write_as(driver, write, job, 1)
    before = driver.everything()
    for epoch, is_confirmed in ((1, True), (0, False), (2, False), (1, True)):
        assert write_as(driver, write, job, epoch) is is_confirmed
        assert driver.everything() == before
    driver.check_invariants()


@pytest.mark.req("F-02")
@pytest.mark.parametrize("write", ACCEPTED_IN)
def test_a_move_of_the_attempt_after_it_is_not_confirmed_to_a_zombie(driver, write):
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.release, job.id, 1)
    assert driver.claim("group-b").epoch == 2
    for made in ACCEPTED_IN:
        assert write_as(driver, made, job, 2)
        if made == write:
            break
    before = driver.everything()
    assert not write_as(driver, write, job, 1)
    assert driver.everything() == before


@pytest.mark.req("F-05")
def test_a_cancel_that_came_first_is_told_again(driver):
    job = driver.reach(State.UPLOADING)
    driver.run(request_cancel, driver.account, job.id, "user")
    assert not driver.run(lifecycle.succeed, job.id, 1, RESULT)
    before = driver.everything()
    assert not driver.run(lifecycle.succeed, job.id, 1, RESULT)
    assert driver.everything() == before


@pytest.mark.req("F-02")
def test_a_zombie_changes_nothing_of_the_attempt_after_it(driver):
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.release, job.id, 1)
    assert driver.claim("group-b").epoch == 2
    before = driver.everything()
    for write in FENCED:
        assert not write_as(driver, write, job, 1), write
        assert driver.everything() == before, write


@pytest.mark.req("F-03")
def test_each_move_writes_the_next_event(driver):
    job = driver.reach(State.SUCCEEDED)
    events = driver.events(job.id)
    assert [(event.seq, event.type, event.epoch) for event in events] == [
        (1, "queued", 0),
        (2, "starting", 1),
        (3, "running", 1),
        (4, "uploading", 1),
        (5, "succeeded", 1),
    ]
    assert [event.data.get("from") for event in events] == [
        None,
        "queued",
        "starting",
        "running",
        "uploading",
    ]
    assert job.seq == 5


@pytest.mark.req("F-03")
def test_a_move_that_is_rolled_back_leaves_no_event(driver):
    job = driver.reach(State.STARTING)

    def move_and_fail(conn):
        assert lifecycle.mark_running(conn, job.id, 1)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        driver.run(move_and_fail)
    assert [event.type for event in driver.events(job.id)] == ["queued", "starting"]
    assert driver.job(job.id).seq == 2


@pytest.mark.req("F-04")
def test_times_are_set_once_on_the_attempt_and_mirrored_on_the_job(driver):
    job = driver.reach(State.SUCCEEDED)
    (attempt,) = driver.attempts(job.id)
    times = ("queued_at", "started_at", "running_at", "uploading_at")
    assert [getattr(attempt, name) for name in times] == [getattr(job, name) for name in times]
    assert attempt.ended_at == job.finished_at
    in_order = [job.queued_at, job.started_at, job.running_at, job.uploading_at, job.finished_at]
    assert in_order == sorted(in_order)


@pytest.mark.req("F-04")
def test_a_second_attempt_has_times_of_its_own_and_the_job_shows_the_latest(driver):
    job = driver.reach(State.UPLOADING)
    driver.run(lifecycle.release, job.id, 1)
    second = driver.claim("group-b").job
    first_attempt, second_attempt = driver.attempts(job.id)
    assert first_attempt.outcome == "requeued"
    assert second_attempt.started_at == second.started_at > first_attempt.started_at
    # Its place in the queue is that of the first submit; what it waited is not.
    assert second_attempt.queued_at == first_attempt.ended_at > second.queued_at == first_attempt.queued_at
    assert (second.running_at, second.uploading_at, second.finished_at) == (None, None, None)


def test_a_requeue_forgets_the_progress_but_not_the_place_in_the_queue(driver):
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.beat, job.id, 1, GROUP, Progress("denoise", 3, 4))
    released = driver.run(lifecycle.release, job.id, 1)
    assert (released.phase, released.step, released.progress, released.group_id) == (None, 0, 0, None)
    assert (released.queued_at, released.rank_at) == (job.queued_at, job.rank_at)
    assert (released.lease_until, released.attempt_deadline) == (None, None)


def test_a_job_that_may_start_at_once_is_rung_for_and_one_that_waits_is_not(driver):
    first = driver.reach(State.RUNNING)
    driver.run(lifecycle.release, first.id, 1)
    again = driver.claim()
    driver.run(lifecycle.fail, first.id, again.epoch, Failure(FailureKind.CRASH))
    rung = driver.sql("SELECT payload FROM outbox ORDER BY id")
    assert [row.payload for row in rung] == [{"job_id": first.id, "profile": "tiny-cpu"}] * 2


def test_an_event_that_is_no_move_takes_the_next_number_too(driver):
    job = driver.reach(State.RUNNING)

    def notice(conn):
        return record_event(conn, lock_job(conn, job.id), "noticed", {"by": "test"}, user_tag="tag")

    after = driver.run(notice)
    assert (after.seq, after.user_tag, after.state) == (4, "tag", State.RUNNING)
    assert driver.events(job.id)[-1].type == "noticed"


def test_an_event_cannot_smuggle_a_state(driver):
    job = driver.reach(State.QUEUED)
    with pytest.raises(ValueError, match="use transition"):
        driver.run(lambda conn: record_event(conn, lock_job(conn, job.id), "noticed", state="failed"))


def test_the_lease_and_the_state_cannot_disagree(driver):
    driver.submit()
    with pytest.raises(DBAPIError, match="ck_job_lease"):
        driver.sql("UPDATE job SET lease_until = now()")
