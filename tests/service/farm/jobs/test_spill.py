"""Jobs that wait for nobody are moved, and say so; jobs that somebody may still serve stay."""

from dataclasses import replace

import pytest

from farm import groups, profile_control
from farm.jobs.spill import spill_unfilled, spill_unserved
from farm.jobs.states import State
from farm.profiles import load_profiles
from farm.settings import SHIPPED_PROFILES
from tests.job_rows import REQUEST

LARGE = replace(REQUEST, tier="540p", num_inference_steps=100)


@pytest.fixture(scope="module")
def profiles():
    return load_profiles(SHIPPED_PROFILES)


def waits(driver, profile, *, minutes=11, **changes):
    job = driver.submit(**{"profile": profile, "requested_profile": "auto", "request": LARGE, **changes})
    driver.age(job.id, queued_at=f"{minutes} minutes", not_before=f"{minutes} minutes")
    return job


def test_a_job_whose_profile_has_no_group_moves_to_one_that_has(driver, profiles):
    driver.register("g", "layerwise-1gpu")
    stuck = waits(driver, "sp4", exec_timeout_s=profiles.get("sp4").execution_timeout_s)
    assert driver.run(spill_unserved, profiles) == 1
    moved = driver.job(stuck.id)
    assert (moved.profile, moved.state, moved.gpus) == ("layerwise-1gpu", State.QUEUED, 1)
    assert moved.exec_timeout_s == profiles.get("layerwise-1gpu").execution_timeout_s
    event = driver.events(stuck.id)[-1]
    assert (event.type, event.data) == (
        "rerouted",
        {"from": "sp4", "to": "layerwise-1gpu", "why": "unserved"},
    )
    assert driver.sql("SELECT payload FROM outbox ORDER BY id")[-1].payload["profile"] == "layerwise-1gpu"
    assert driver.claim("g", "layerwise-1gpu").job.id == stuck.id
    assert driver.run(spill_unserved, profiles) == 0
    driver.check_invariants()


@pytest.mark.parametrize("case", ["fresh", "named", "served lately", "small caps", "paused"])
def test_a_job_stays_where(driver, profiles, case):
    driver.register("g", "tiny-cpu" if case == "small caps" else "layerwise-1gpu")
    named = "sp4" if case == "named" else "auto"
    stuck = waits(driver, "sp4", minutes=9 if case == "fresh" else 11, requested_profile=named)
    if case == "served lately":
        driver.register("old", "sp4")
        past = "heartbeat_at = now() - interval '9 minutes'"
        driver.sql(f"UPDATE worker_group SET state = 'gone', {past} WHERE id = 'old'")
    if case == "paused":
        driver.run(profile_control.pause_profile, "layerwise-1gpu", "op")
    assert driver.run(spill_unserved, profiles) == 0
    assert driver.job(stuck.id).profile == "sp4"


def test_a_wave_that_is_not_filled_in_time_spills_where_the_profile_says_so(driver, profiles):
    driver.register("g", "sp4")
    jobs = [waits(driver, "dlo-dp4", minutes=2, requested_profile="dlo-dp4") for _ in range(2)]
    assert driver.run(spill_unfilled, profiles) == 0  # it pads
    driver.run(profile_control.set_waves, "dlo-dp4", "op", size=None, max_wait_s=180, fill="spill")
    assert driver.run(spill_unfilled, profiles) == 0  # not yet
    driver.run(profile_control.set_waves, "dlo-dp4", "op", size=None, max_wait_s=60, fill="spill")
    assert driver.run(spill_unfilled, profiles) == 2
    assert {driver.job(job.id).profile for job in jobs} == {"sp4"}
    assert driver.events(jobs[0].id)[-1].data["why"] == "wave_unfilled"


def test_a_full_wave_does_not_spill(driver, profiles):
    driver.register("g", "sp4")
    driver.run(profile_control.set_waves, "dlo-dp4", "op", size=None, max_wait_s=0, fill="spill")
    for _ in range(4):
        waits(driver, "dlo-dp4", requested_profile="dlo-dp4")
    assert driver.run(spill_unfilled, profiles) == 0


@pytest.mark.parametrize("state", ["sick", "draining", "gone"])
def test_auto_does_not_choose_a_profile_that_takes_no_jobs(driver, state):
    driver.register("g1", "sp4", state=state)
    driver.register("g2", "tiny-cpu")
    assert driver.run(groups.live_profiles) == {"tiny-cpu"}


def test_auto_does_not_choose_a_paused_profile(driver):
    driver.register("g1", "sp4")
    driver.register("g2", "tiny-cpu")
    driver.run(profile_control.pause_profile, "sp4", "op")
    assert driver.run(groups.live_profiles) == {"tiny-cpu"}
