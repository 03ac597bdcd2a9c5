"""The failure table, row by row."""

import pytest

from farm.jobs.job import Rules
from farm.jobs.policy import Failure, FailureKind, decide, error_of
from farm.jobs.states import State
from tests.job_rows import AT, running_job

ALL_KINDS = list(FailureKind)


def outcome(kind, job=None, *, jitter=0.0, **details):
    return decide(Failure(kind, **details), job or running_job(), rules=Rules(), jitter=jitter)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_requested_cancel_wins_over_every_failure(kind):
    action = outcome(kind, running_job(cancel_requested_at=AT))
    assert action.to is State.CANCELED
    assert action.error["code"] == "canceled"


@pytest.mark.req("F-15")
def test_bad_input_is_permanent_and_tells_the_user_what_was_found():
    action = outcome(FailureKind.INVALID_INPUT, message="prompt is 7421 tokens; at most 7000 are supported")
    assert action.to is State.FAILED
    assert action.error == {
        "code": "invalid_input",
        "message": "prompt is 7421 tokens; at most 7000 are supported",
        "retryable": False,
    }


def test_a_deadline_is_permanent():
    action = outcome(FailureKind.DEADLINE)
    assert (action.to, action.error["code"]) == (State.FAILED, "deadline_exceeded")


def test_a_first_engine_error_is_tried_on_another_group():
    action = outcome(FailureKind.ENGINE_ERROR, running_job(group_id="group-a"))
    assert action.to is State.QUEUED
    assert action.columns == {"engine_errors": 1, "avoid_group": "group-a"}
    assert action.delay_s == 0


def test_a_second_engine_error_fails_the_job():
    action = outcome(FailureKind.ENGINE_ERROR, running_job(engine_errors=1, attempts=2))
    assert (action.to, action.error["code"]) == (State.FAILED, "engine_error")


def test_out_of_memory_moves_to_a_profile_with_more_room():
    action = outcome(FailureKind.OUT_OF_MEMORY, roomier_profile="layerwise-1gpu")
    assert action.to is State.QUEUED
    assert action.columns == {"profile": "layerwise-1gpu"}


def test_out_of_memory_without_such_a_profile_fails():
    action = outcome(FailureKind.OUT_OF_MEMORY)
    assert (action.to, action.error["code"]) == (State.FAILED, "out_of_memory")


def test_a_crash_waits_ten_seconds_and_is_remembered_with_its_group():
    action = outcome(FailureKind.CRASH, running_job(group_id="group-a"))
    assert (action.to, action.delay_s) == (State.QUEUED, 10)
    assert action.columns == {"crash_count": 1, "crash_groups": ["group-a"]}


def test_a_second_crash_on_the_same_group_waits_twice_as_long():
    job = running_job(crash_count=1, crash_groups=["group-a"], group_id="group-a", attempts=2)
    assert outcome(FailureKind.CRASH, job).delay_s == 20


@pytest.mark.parametrize(("jitter", "delay_s"), [(-1, 8), (1, 12)])
def test_waits_are_spread_by_a_fifth(jitter, delay_s):
    assert outcome(FailureKind.CRASH, jitter=jitter).delay_s == pytest.approx(delay_s)


@pytest.mark.req("F-46")
def test_two_crashes_on_two_groups_are_poison():
    job = running_job(crash_count=1, crash_groups=["group-a"], group_id="group-b", attempts=2)
    action = outcome(FailureKind.CRASH, job)
    assert (action.to, action.error["code"]) == (State.FAILED, "poison_job")
    assert action.columns == {"crash_count": 2, "crash_groups": ["group-a", "group-b"]}


@pytest.mark.req("F-46")
def test_three_crashes_anywhere_are_poison_whatever_the_budget():
    job = running_job(crash_count=2, crash_groups=["group-a"], group_id="group-a", attempts=3, max_attempts=5)
    error = outcome(FailureKind.CRASH, job).error
    assert (error["code"], "several" in error["message"]) == ("poison_job", False)  # it was one group


def test_a_first_lost_agent_costs_no_wait_and_none_of_the_budget():
    action = outcome(FailureKind.AGENT_LOST, running_job(attempts=3, max_attempts=3))
    assert (action.to, action.delay_s, action.columns) == (State.QUEUED, 0, {"infra_losses": 1})


@pytest.mark.parametrize(("losses", "delay_s"), [(1, 10), (2, 20), (4, 80)])
def test_later_lost_agents_wait_longer_each_time(losses, delay_s):
    job = running_job(infra_losses=losses, attempts=losses + 1)
    assert outcome(FailureKind.AGENT_LOST, job).delay_s == delay_s


def test_more_lost_agents_than_the_cap_fail_the_job():
    assert outcome(FailureKind.AGENT_LOST, running_job(infra_losses=4, attempts=5)).to is State.QUEUED
    action = outcome(FailureKind.AGENT_LOST, running_job(infra_losses=5, attempts=6))
    assert (action.to, action.error["code"]) == (State.FAILED, "worker_lost")


def test_the_cap_on_lost_agents_is_a_rule():
    job = running_job(infra_losses=500, attempts=501)
    action = decide(Failure(FailureKind.AGENT_LOST), job, rules=Rules(max_infra_losses=1000))
    assert (action.to, action.delay_s) == (State.QUEUED, 600)


def test_upload_errors_requeue_twice_and_then_fail():
    first = outcome(FailureKind.UPLOAD, running_job(state=State.UPLOADING))
    second = outcome(FailureKind.UPLOAD, running_job(upload_failures=1, attempts=2, max_attempts=5))
    third = outcome(FailureKind.UPLOAD, running_job(upload_failures=2, attempts=3, max_attempts=5))
    assert [first.to, second.to, third.to] == [State.QUEUED, State.QUEUED, State.FAILED]
    assert [first.delay_s, second.delay_s] == [10, 20]
    assert third.error["code"] == "upload_failed"


def test_a_preempted_job_returns_at_once_and_pays_nothing():
    action = outcome(FailureKind.PREEMPTED, running_job(attempts=9, preemptions=8, max_attempts=1))
    assert (action.to, action.delay_s, action.columns) == (State.QUEUED, 0, {"preemptions": 9})


def test_a_defect_of_the_farm_is_tried_again_within_the_budget():
    assert outcome(FailureKind.INTERNAL).to is State.QUEUED
    action = outcome(FailureKind.INTERNAL, running_job(attempts=3))
    assert (action.to, action.error["code"]) == (State.FAILED, "internal")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FailureKind.ENGINE_ERROR, "engine_error"),
        (FailureKind.CRASH, "worker_crashed"),
        (FailureKind.UPLOAD, "upload_failed"),
        (FailureKind.INTERNAL, "internal"),
        (FailureKind.OUT_OF_MEMORY, "out_of_memory"),
    ],
)
def test_with_the_last_attempt_used_up_the_job_fails_for_its_last_reason(kind, code):
    job = running_job(attempts=3, max_attempts=3)
    action = outcome(kind, job, roomier_profile="layerwise-1gpu")
    assert (action.to, action.error["code"]) == (State.FAILED, code)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_leads_along_an_edge_of_an_active_job(kind):
    assert outcome(kind).to in {State.QUEUED, State.FAILED, State.CANCELED}


def test_errors_of_operators_never_reach_the_user():
    action = outcome(FailureKind.ENGINE_ERROR, running_job(engine_errors=1), detail={"log": "/srv/secret"})
    assert "secret" not in str(action.error)


def test_only_what_cannot_change_is_not_worth_a_retry():
    codes = ["canceled", "expired", "deadline_exceeded", "invalid_input", "out_of_memory", "engine_error"]
    codes += [
        "worker_lost",
        "worker_crashed",
        "poison_job",
        "upload_failed",
        "profile_unavailable",
        "internal",
    ]
    lost = {code for code in codes if not error_of(code)["retryable"]}
    assert lost == {"invalid_input", "out_of_memory", "poison_job"}


@pytest.mark.req("F-45")
def test_a_crash_beside_neighbours_is_a_loss_of_the_farm_and_blames_nobody():
    action = outcome(FailureKind.CRASH, running_job(crash_count=2, crashed_waves=1), neighbours=3)
    assert (action.to, action.delay_s) == (State.QUEUED, 0)
    assert action.columns == {"infra_losses": 1, "crashed_waves": 2}


@pytest.mark.req("F-46")
def test_a_crash_without_neighbours_is_the_jobs_own_also_after_crashed_waves():
    action = outcome(FailureKind.CRASH, running_job(crashed_waves=2, infra_losses=2, attempts=3))
    assert action.columns == {"crash_count": 1, "crash_groups": ["group-a"]}


def test_an_agent_lost_with_a_wave_counts_as_a_crashed_wave():
    alone, together = (outcome(FailureKind.AGENT_LOST, neighbours=count) for count in (0, 1))
    assert alone.columns == {"infra_losses": 1}
    assert together.columns == {"infra_losses": 1, "crashed_waves": 1}
