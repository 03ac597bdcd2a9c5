"""Waves on real ranks with the chaos engine: who is rendered beside whom, and what ends whom."""

import os
import signal
from dataclasses import replace

import pytest

from farm import profile_control, waves
from farm.db.session import unit_of_work
from farm.jobs.states import State
from farm.profiles import Profile
from tests.service.worker.harness import PROFILE, QUICK, chaos, wait_until
from worker.liveness import StallLimits

LONG = {"steps": 150, "step_s": 0.05}
ENDS = (State.SUCCEEDED, State.FAILED, State.CANCELED)


@pytest.fixture
def start_wave_agent(start_agent):
    """Return a function that starts an agent whose ranks are replicas of a data-parallel layout."""

    def start(num_slots=2, ranks_each=1, **overrides):
        profile = Profile(
            PROFILE,
            0,
            deterministic=False,
            execution_timeout_s=900,
            layout={"data_parallel": num_slots, "ulysses": ranks_each},
            wave_size=num_slots,
            default_tier="272p",
            default_steps=4,
        )
        return start_agent(profile=profile, **overrides)

    return start


def submit_long(bench, **members):
    return bench.submit(chaos(step_s=LONG["step_s"], **members), steps=LONG["steps"])


def all_waves(bench):
    with unit_of_work(bench.database) as conn:
        return waves.list_waves(conn)


def last_wave(bench):
    """Return the newest wave once its end is recorded."""
    return wait_until(
        lambda: all_waves(bench) and all_waves(bench)[0].ended_at and all_waves(bench)[0], "a wave's end"
    )


@pytest.mark.req("F-45")
def test_members_are_rendered_side_by_side_and_each_gets_its_own_clip(bench, start_wave_agent):
    agent = start_wave_agent(num_slots=4)
    sizes = [(448, 256), (448, 256), (320, 180), (640, 360)]
    jobs = [bench.submit(output=size) for size in sizes]
    done = [bench.wait(job, *ENDS) for job in jobs]
    assert [job.state for job in done] == [State.SUCCEEDED] * 4
    # A clip of another member would have failed the self-check of its size.
    assert [(job.result["video"]["width"], job.result["video"]["height"]) for job in done] == sizes
    assert {job.result["conditioning"]["slot"] for job in done} == {0, 1, 2, 3}
    assert len({attempt.wave_id for job in jobs for attempt in bench.attempts(job)}) == 1
    assert all(bench.event_types(job)[-1] == "succeeded" for job in jobs)
    wave = last_wave(bench)
    assert (wave.fill, wave.num_ghosts, wave.outcome) == ("full", 0, "ended")
    assert len(agent.pids) == 4


@pytest.mark.req("F-45")
def test_an_incomplete_wave_is_padded_with_ghosts(bench, start_wave_agent):
    with unit_of_work(bench.database) as conn:
        profile_control.set_waves(conn, PROFILE, "op", size=None, max_wait_s=0, fill="pad")
    start_wave_agent(num_slots=2, ranks_each=2)
    assert bench.wait(bench.submit(), *ENDS).state is State.SUCCEEDED
    wave = last_wave(bench)
    assert (wave.fill, wave.num_slots, wave.num_members, wave.num_ghosts) == ("pad", 2, 1, 1)


@pytest.mark.req("F-45")
def test_a_canceled_member_becomes_a_ghost_and_the_other_finishes(bench, start_wave_agent):
    agent = start_wave_agent()
    first, second = submit_long(bench), submit_long(bench)
    pids = agent.pids
    bench.wait_for_step(second)
    bench.cancel(first)
    assert bench.wait(first, *ENDS).state is State.CANCELED
    assert bench.job(second.id).state is State.RUNNING  # nobody waits for the wave to be told
    assert bench.wait(second, *ENDS).state is State.SUCCEEDED
    assert last_wave(bench).num_ghosts == 1
    assert agent.pids == pids


@pytest.mark.req("F-45")
def test_a_wave_without_members_stops_at_the_next_step(bench, start_wave_agent):
    agent = start_wave_agent()
    jobs = [bench.submit(chaos(step_s=0.2), steps=200) for _ in range(2)]
    pids = agent.pids
    for job in jobs:
        bench.wait_for_step(job)
    for job in jobs:
        bench.cancel(job)
    assert [bench.wait(job, *ENDS).state for job in jobs] == [State.CANCELED] * 2
    assert last_wave(bench).num_ghosts == 2
    assert agent.pids == pids  # they left in step, nobody had to be killed


@pytest.mark.req("F-45")
def test_a_bad_member_fails_alone_before_any_rank_begins(bench, start_wave_agent):
    start_wave_agent()
    bad = bench.submit(chaos(do="invalid_input"))
    good = bench.submit()
    failed = bench.wait(bad, *ENDS)
    assert (failed.state, failed.error["code"]) == (State.FAILED, "invalid_input")
    assert "running" not in bench.event_types(bad)
    assert bench.wait(good, *ENDS).state is State.SUCCEEDED
    assert last_wave(bench).num_ghosts == 1


@pytest.mark.parametrize(
    ("misdeed", "code"), [("engine_error", "engine_error"), ("out_of_memory", "out_of_memory")]
)
def test_a_fault_in_one_slot_is_that_members(bench, start_wave_agent, misdeed, code):
    start_wave_agent()
    bad = bench.submit(chaos(do=misdeed, at=1), max_attempts=1)
    good = bench.submit()
    failed = bench.wait(bad, *ENDS)
    assert (failed.state, failed.error["code"]) == (State.FAILED, code)
    assert bench.wait(good, *ENDS).state is State.SUCCEEDED


@pytest.mark.req("F-45")
def test_a_killed_rank_costs_every_member_this_attempt_and_no_more(bench, start_wave_agent):
    agent = start_wave_agent()
    jobs = [submit_long(bench), submit_long(bench)]
    pids = agent.pids
    for job in jobs:
        bench.wait_for_step(job)
    os.kill(pids[1], signal.SIGKILL)  # of one replica; the other does what it should
    assert [bench.wait(job, *ENDS).state for job in jobs] == [State.SUCCEEDED] * 2
    for job in jobs:
        found = bench.job(job.id)
        assert (found.infra_losses, found.crashed_waves, found.crash_count, found.attempts) == (1, 1, 0, 2)
        lost, won = bench.attempts(job)
        assert (lost.outcome, lost.error["code"], won.outcome) == ("requeued", "crash", "succeeded")
        assert bench.event_types(job).count("running") == 2
    wait_until(lambda: all_waves(bench)[0].ended_at, "the second wave's end")
    second, first = all_waves(bench)
    assert (first.outcome, second.outcome, second.fill) == ("crashed", "ended", "full")
    for wave in (first, second):
        assert {member.job_id for member in wave.members} == {job.id for job in jobs}
    assert not set(pids) & set(agent.pids)  # the healthy replica was restarted with it


@pytest.mark.req("F-46")
def test_two_crashed_waves_and_then_each_runs_alone(bench, start_wave_agent):
    start_wave_agent()
    poison = bench.submit(chaos(do="sigkill", at=1, epochs=[1, 2]))
    innocent = bench.submit()
    assert bench.wait(innocent, *ENDS).state is State.SUCCEEDED
    assert bench.wait(poison, *ENDS).state is State.SUCCEEDED
    assert [wave.fill for wave in reversed(all_waves(bench))] == ["full", "full", "alone", "alone"]
    for job in (poison, innocent):
        found = bench.job(job.id)
        assert (found.crashed_waves, found.infra_losses, found.crash_count) == (2, 2, 0)
        assert [attempt.outcome for attempt in bench.attempts(job)] == ["requeued", "requeued", "succeeded"]


@pytest.mark.req("F-46")
def test_a_crash_of_a_job_alone_is_its_own(bench, start_wave_agent):
    with unit_of_work(bench.database) as conn:
        profile_control.set_waves(conn, PROFILE, "op", size=None, max_wait_s=0, fill="pad")
    start_wave_agent()
    job = bench.submit(chaos(do="sigkill", at=1, epochs=[1]))
    assert bench.wait(job, *ENDS).state is State.SUCCEEDED
    found = bench.job(job.id)
    assert (found.crash_count, found.crashed_waves, found.infra_losses) == (1, 0, 0)


def test_a_wave_is_given_back_when_its_agent_must_leave(bench, start_wave_agent):
    agent = start_wave_agent()
    jobs = [submit_long(bench) for _ in range(2)]
    for job in jobs:
        bench.wait_for_step(job)
    agent.stop(now=True)
    for job in jobs:
        found = bench.job(job.id)
        assert (found.state, found.preemptions, found.crashed_waves) == (State.QUEUED, 1, 0)
    assert last_wave(bench).outcome == "given_back"


def test_a_frozen_replica_costs_all_members_their_leases(bench, start_wave_agent):
    impatient = replace(QUICK, stall=StallLimits(load_s=30, first_step_s=4, step_s=4, other_s=20))
    start_wave_agent(times=impatient)
    jobs = [bench.submit(chaos(do="freeze", at=1, epochs=[1])), bench.submit()]
    assert [bench.wait(job, *ENDS).state for job in jobs] == [State.SUCCEEDED] * 2
    assert [bench.job(job.id).crashed_waves for job in jobs] == [1, 1]
