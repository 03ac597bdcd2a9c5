"""The place in the queue and the time until the end, from what the profile has shown so far."""

import pytest

from farm.jobs import estimates, lifecycle
from farm.jobs.lifecycle import Result
from farm.jobs.phases import Progress
from farm.jobs.states import State
from tests.service.driver import GROUP, VIDEO


def position(driver, job):
    return driver.run(estimates.queue_position, driver.job(job.id))


def eta(driver, job):
    return driver.run(estimates.eta_s, driver.job(job.id))


def finish_a_clip(driver, *, denoise_s, whole_s):
    """Let the profile finish a clip of four steps that took so long."""
    job = driver.reach(State.UPLOADING)
    result = Result({"stage_durations": {"denoise": denoise_s}}, [VIDEO])
    assert driver.run(lifecycle.succeed, job.id, 1, result)
    past = f"interval '{whole_s} seconds'"
    driver.sql(f"UPDATE job_attempt SET started_at = ended_at - {past} WHERE job_id = :id", id=job.id)


def test_the_position_follows_the_order_of_claims(driver):
    first, second, urgent = driver.submit(), driver.submit(), driver.submit(priority=5)
    assert [position(driver, job) for job in (urgent, first, second)] == [1, 2, 3]


def test_other_profiles_do_not_count(driver):
    driver.submit(profile="sp4")
    assert position(driver, driver.submit()) == 1


def test_a_job_that_does_not_wait_has_no_position(driver):
    assert position(driver, driver.reach(State.RUNNING)) is None


def test_there_is_no_estimate_before_the_first_clip_and_none_after_the_end(driver):
    assert eta(driver, driver.submit()) is None
    driver.wipe()
    finish_a_clip(driver, denoise_s=8, whole_s=10)
    assert eta(driver, driver.reach(State.FAILED)) is None


def test_a_running_job_is_estimated_by_its_progress(driver):
    finish_a_clip(driver, denoise_s=8, whole_s=10)
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.beat, job.id, 1, GROUP, Progress("denoise", 4, 4))
    assert eta(driver, job) == pytest.approx(1.0)


def test_steps_cost_what_they_cost_before_and_the_rest_stays(driver):
    finish_a_clip(driver, denoise_s=8, whole_s=10)
    pace = driver.run(estimates.measure_pace, "tiny-cpu", "272p")
    assert (pace.step_s, pace.rest_s) == (pytest.approx(2.0), pytest.approx(2.0))
    assert pace.clip_s(10) == pytest.approx(22.0)


def test_one_odd_clip_does_not_spoil_the_estimate(driver):
    for denoise_s in (8, 8, 4000):
        finish_a_clip(driver, denoise_s=denoise_s, whole_s=denoise_s + 2)
    assert driver.run(estimates.measure_pace, "tiny-cpu", "272p").step_s == pytest.approx(2.0)


def test_other_tiers_and_profiles_tell_nothing(driver):
    finish_a_clip(driver, denoise_s=8, whole_s=10)
    assert driver.run(estimates.measure_pace, "tiny-cpu", "540p") is None
    assert driver.run(estimates.measure_pace, "sp4", "272p") is None


def test_a_queued_job_waits_for_those_before_it(driver):
    finish_a_clip(driver, denoise_s=8, whole_s=10)
    driver.register()
    first, second = driver.submit(), driver.submit()
    assert eta(driver, first) == pytest.approx(10.0)
    assert eta(driver, second) == pytest.approx(20.0)
    driver.claim()
    assert eta(driver, second) == pytest.approx(15.0)
