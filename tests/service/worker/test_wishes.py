"""What operators wish of a group, and what it says of itself: drain and back, restart, sick, warm-up."""

import json

import pytest

from farm.errors import GroupGoneError
from farm.jobs.states import State
from farm.profiles import Profile
from tests.service.worker.harness import PROFILE, chaos, is_alive, wait_until

ENDS = (State.SUCCEEDED, State.FAILED, State.CANCELED)


def long_job(bench):
    job = bench.submit(chaos(step_s=0.1), steps=100)
    bench.wait_for_step(job)
    return job


def test_a_drain_is_taken_back_while_the_last_job_runs(bench, start_agent):
    agent = start_agent()
    group_id = agent.agent.group_id
    job = long_job(bench)
    bench.wish(group_id, "draining")
    wait_until(lambda: bench.group_state(group_id) == "draining", "the drain")
    bench.wish(group_id, None)
    wait_until(lambda: bench.group_state(group_id) == "busy", "the end of the drain")
    assert bench.wait(job, State.SUCCEEDED, State.FAILED).state is State.SUCCEEDED
    assert bench.wait(bench.submit(), State.SUCCEEDED, State.FAILED).state is State.SUCCEEDED


def test_a_drain_by_a_signal_is_not_taken_back(bench, start_agent):
    agent = start_agent()
    group_id = agent.agent.group_id
    job = long_job(bench)
    agent.agent.drain()
    bench.wish(group_id, "draining")
    bench.wish(group_id, None)
    agent.thread.join(60)
    assert bench.job(job.id).state is State.SUCCEEDED
    assert bench.group_state(group_id) == "gone"
    with pytest.raises(GroupGoneError):
        bench.wish(group_id, "draining")


def test_a_group_that_must_leave_gives_its_job_back_at_once(bench, start_agent):
    agent = start_agent()
    job = long_job(bench)
    bench.wish(agent.agent.group_id, "leaving")
    agent.thread.join(60)
    assert not agent.thread.is_alive()
    found = bench.job(job.id)
    assert (found.state, found.preemptions) == (State.QUEUED, 1)


def test_ranks_are_restarted_between_two_jobs_and_the_wish_is_forgotten(bench, start_agent):
    agent = start_agent()
    group_id, pids = agent.agent.group_id, agent.pids
    job = long_job(bench)
    bench.wish(group_id, "restarting")
    assert bench.wait(job, State.SUCCEEDED, State.FAILED).state is State.SUCCEEDED
    wait_until(lambda: agent.pids and agent.pids != pids and agent.agent.group.is_ready, "new ranks")
    assert not any(is_alive(pid) for pid in pids)
    wait_until(lambda: bench.group(group_id).wanted_state is None, "the wish being forgotten")
    assert bench.wait(bench.submit(), State.SUCCEEDED).epoch == 1
    assert bench.group(group_id).stats["restarts"] == 0  # those are failures


def test_a_sick_group_claims_nothing_until_its_ranks_are_restarted(bench, start_agent):
    agent = start_agent()
    group_id = agent.agent.group_id
    agent.agent._health.check = lambda: "device 0 is missing: Not Found"
    wait_until(lambda: bench.group_state(group_id) == "sick", "the group being sick")
    wait_until(lambda: bench.group(group_id).stats.get("sick_reason"), "the reason")
    assert bench.group(group_id).stats["sick_reason"] == "device 0 is missing: Not Found"
    job = bench.submit()
    agent.agent.ring(job.id, PROFILE)
    agent.agent._health.check = lambda: ""
    for _ in range(3):  # several polls of a group whose devices look well again
        agent.agent._wake.set()
        wait_until(lambda: not agent.agent._wake.is_set(), "a look around")
    assert bench.job(job.id).state is State.QUEUED
    bench.wish(group_id, "restarting")
    assert bench.wait(job, State.SUCCEEDED).epoch == 1
    wait_until(lambda: bench.group(group_id).stats["sick_reason"] == "", "the reason being forgotten")


def test_a_group_says_what_it_is_and_how_it_does(bench, start_agent):
    agent = start_agent()
    group_id = agent.agent.group_id
    job = long_job(bench)
    wait_until(lambda: bench.group(group_id).stats.get("busy_1h"), "time that was busy")
    found = bench.group(group_id)
    assert (found.deterministic, found.contract_versions, found.is_live) == (False, [1], True)
    assert (found.stats["devices"], found.stats["note"]) == ([], "no devices")
    assert [held.id for held in found.jobs] == [job.id]
    bench.cancel(job)


def warmed_up(**script):
    return Profile(
        PROFILE,
        0,
        deterministic=False,
        execution_timeout_s=900,
        default_tier="272p",
        default_steps=4,
        warm_up=True,
        **script,
    )


def test_a_group_that_warms_up_renders_a_clip_before_it_is_ready(bench, start_agent):
    agent = start_agent(profile=warmed_up(layout={"data_parallel": 2}, wave_size=2))
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "ready", "the group being ready")
    assert list(agent.agent._folder.work_dir.iterdir()) == []


def test_a_group_whose_warm_up_fails_never_claims(bench, start_agent, monkeypatch):
    job = bench.submit()
    monkeypatch.setattr("worker.warm_up.PROMPT", "chaos " + json.dumps({"file": "truncated"}))
    agent = start_agent(wait=False, profile=warmed_up())
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "sick", "the group being sick")
    assert bench.job(job.id).epoch == 0


def test_memory_is_measured_where_an_operator_asks_for_it(bench, start_agent, settings):
    measuring = settings.worker.model_copy(update={"measure": True})
    start_agent(settings=settings.model_copy(update={"worker": measuring}))
    done = bench.wait(bench.submit(), State.SUCCEEDED, State.FAILED)
    (attempt,) = bench.attempts(done)
    assert attempt.measured["host_pss_mb"] == done.result["peak_host_pss_mb"] > 1
    assert attempt.measured["device_memory_mb"] == []  # this machine has no device


def test_a_failed_attempt_keeps_the_peaks_of_memory_too(bench, start_agent, settings):
    measuring = settings.worker.model_copy(update={"measure": True})
    start_agent(settings=settings.model_copy(update={"worker": measuring}))
    failed = bench.wait(bench.submit(chaos(do="engine_error", at=1), max_attempts=1), *ENDS)
    (attempt,) = bench.attempts(failed)
    assert (failed.state, attempt.outcome) == (State.FAILED, "failed")
    assert attempt.measured["host_pss_mb"] > 1
    assert attempt.measured["num_samples"] > 0
