"""What a profile says to a new job: no while it is paused or full, and what its owner should know."""

import pytest

from farm import profile_control
from farm.errors import InvalidFieldError, ProfileFullError, ProfilePausedError
from tests.service.driver import PROFILE


def test_a_paused_profile_takes_no_job_and_leaves_no_trace(driver):
    driver.run(profile_control.pause_profile, PROFILE, "op", "new weights")
    before = driver.everything()
    with pytest.raises(ProfilePausedError, match=r"profile tiny-cpu is paused \(new weights\)"):
        driver.submit()
    assert driver.everything() == before
    driver.submit(profile="sp4")
    driver.run(profile_control.resume_profile, PROFILE, "op")
    driver.submit()


def test_a_full_profile_takes_no_more_jobs_of_any_account(driver):
    driver.run(profile_control.set_max_queued, PROFILE, "op", 2)
    driver.submit()
    driver.submit(driver.new_account())
    with pytest.raises(ProfileFullError, match="2 jobs are waiting for profile tiny-cpu"):
        driver.submit()
    driver.submit(profile="sp4")
    assert driver.claim() is not None
    driver.submit()
    driver.check_invariants()


@pytest.mark.parametrize(("state", "num_notices"), [("ready", 0), ("busy", 0), ("sick", 1), ("gone", 1)])
def test_a_job_for_a_profile_that_nobody_serves_is_told_so(driver, state, num_notices):
    driver.register(state=state)
    notices = driver.submit(notices=["of the request"]).notices
    assert notices[0] == "of the request"
    assert len(notices) == 1 + num_notices
    assert all("no worker serves profile tiny-cpu" in notice for notice in notices[1:])


def test_a_group_that_was_not_heard_of_for_a_while_serves_nobody(driver):
    driver.register()
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '31 seconds'")
    assert len(driver.submit().notices) == 1


@pytest.mark.parametrize(
    ("limits", "wave_size", "is_told"),
    [({}, 4, False), ({"max_running": 3}, 4, True), ({"max_running": 4}, 4, False), ({}, 9, True)],
)
def test_an_account_that_can_never_fill_a_wave_is_told_so(driver, limits, wave_size, is_told):
    driver.register()
    notices = driver.submit(driver.new_account(**limits), wave_size=wave_size).notices
    assert [f"runs waves of {wave_size}" in notice for notice in notices] == [True] * is_told


def test_settings_of_a_profile_are_checked_and_kept(driver):
    assert driver.run(profile_control.get_control, "sp4") == profile_control.Control("sp4")
    driver.run(profile_control.set_waves, "sp4", "op", size=2, max_wait_s=5, fill="wait")
    driver.run(profile_control.pause_profile, "sp4", "op2", "why")
    kept = driver.run(profile_control.list_controls)["sp4"]
    assert (kept.wave_size, kept.wave_max_wait_s, kept.wave_fill, kept.paused) == (2, 5, "wait", True)
    assert (kept.paused_reason, kept.changed_by) == ("why", "op2")
    assert driver.run(profile_control.paused_profiles) == {"sp4"}
    for bad in ({"size": 0}, {"max_wait_s": -1}, {"fill": "maybe"}):
        with pytest.raises(InvalidFieldError, match=r"must"):
            driver.run(
                profile_control.set_waves,
                "sp4",
                "op",
                **{"size": None, "max_wait_s": 0, "fill": "pad", **bad},
            )
    with pytest.raises(InvalidFieldError):
        driver.run(profile_control.set_max_queued, "sp4", "op", -1)
