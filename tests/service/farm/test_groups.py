"""Groups: registration, heartbeats, and what counts as live."""

import pytest

from farm import groups
from farm.errors import GroupGoneError, InvalidFieldError, NotFoundError
from farm.groups import Group, Wish
from farm.profiles import load_profiles
from farm.settings import SHIPPED_PROFILES


def test_a_group_registers_as_booting_and_then_says_how_it_is(driver):
    driver.run(groups.register, Group("g", "host-1", "sp4", "0,1,2,3", "boot-1"))
    assert driver.run(groups.heartbeat, "g", "boot-1", "ready", {"engine": "abc"}) is None
    (row,) = driver.sql("SELECT * FROM worker_group")
    assert (row.host, row.profile, row.devices, row.state) == ("host-1", "sp4", "0,1,2,3", "ready")
    assert row.engine_fingerprint == {"engine": "abc"}


def test_a_heartbeat_without_fingerprint_keeps_the_one_before(driver):
    driver.register("g")
    driver.run(groups.heartbeat, "g", "boot-of-g", "ready", {"engine": "abc"})
    driver.run(groups.heartbeat, "g", "boot-of-g", "busy")
    assert driver.sql("SELECT engine_fingerprint FROM worker_group")[0][0] == {"engine": "abc"}


def test_a_heartbeat_tells_what_an_operator_wants(driver):
    driver.register("g")
    driver.sql("UPDATE worker_group SET wanted_state = 'draining'")
    assert driver.run(groups.heartbeat, "g", "boot-of-g", "busy") == "draining"


def test_a_new_agent_takes_the_group_over_and_the_old_one_is_told(driver):
    driver.register("g")
    driver.sql("UPDATE worker_group SET wanted_state = 'draining'")
    driver.run(groups.register, Group("g", "host-2", "sp4", "", "boot-2"))
    with pytest.raises(NotFoundError):
        driver.run(groups.heartbeat, "g", "boot-of-g", "ready")
    (row,) = driver.sql("SELECT * FROM worker_group")
    assert (row.host, row.profile, row.state, row.wanted_state) == ("host-2", "sp4", "booting", None)


@pytest.mark.parametrize("wish", [Wish.DRAINING, Wish.LEAVING])
def test_a_drain_lasts_beyond_its_agent_until_it_is_taken_back(driver, wish):
    driver.register("g")
    driver.run(groups.set_wanted_state, "g", wish, "admin:alice")
    driver.run(groups.heartbeat, "g", "boot-of-g", "gone")
    assert driver.run(groups.is_drained, "g")
    assert [group.id for group in driver.run(groups.list_groups, with_gone=False)] == ["g"]
    with pytest.raises(GroupGoneError, match="take its drain back first"):
        driver.run(groups.set_wanted_state, "g", Wish.PAUSED, "admin:alice")
    driver.run(groups.set_wanted_state, "g", None, "admin:alice")
    assert not driver.run(groups.is_drained, "g")
    assert driver.run(groups.list_groups, with_gone=False) == []
    with pytest.raises(GroupGoneError, match="start its worker again"):
        driver.run(groups.set_wanted_state, "g", None, "admin:alice")


def test_profiles_of_fresh_groups_are_live(driver):
    driver.register("g1", "sp4")
    driver.register("g2", "tiny-cpu", state="busy")
    driver.register("g3", "dlo-sp4")
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '31 seconds' WHERE id = 'g3'")
    assert driver.run(groups.live_profiles) == {"sp4", "tiny-cpu"}


def test_with_no_group_live_those_that_were_before_count(driver):
    assert driver.run(groups.live_profiles) == set()
    driver.register("g", "tiny-cpu")
    driver.sql("UPDATE worker_group SET state = 'gone'")
    assert driver.run(groups.live_profiles) == {"tiny-cpu"}


def test_silent_groups_are_gone_after_thirty_seconds_and_come_back_with_a_heartbeat(driver):
    driver.register("loud")
    driver.register("silent")
    driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '31 seconds' WHERE id = 'silent'")
    assert driver.run(groups.mark_gone) == 1
    assert driver.run(groups.mark_gone) == 0
    assert driver.sql("SELECT id FROM worker_group WHERE state = 'gone'") == [("silent",)]
    driver.run(groups.heartbeat, "silent", "boot-of-silent", "ready")
    assert driver.sql("SELECT id FROM worker_group WHERE state = 'gone'") == []


def test_group_is_asked_for_another_profile_of_as_many_devices(driver):
    profiles = load_profiles(SHIPPED_PROFILES)
    driver.run(groups.register, Group("g", "host-1", "sp4", "0,1,2,3", "boot-1"))
    before, after = driver.run(groups.change_profile, "g", "dlo-sp4", profiles, "admin:alice")
    assert (before.wanted_state, before.wanted_profile) == (None, None)
    assert (after.wanted_state, after.wanted_profile, after.wanted_by) == (
        Wish.CHANGING,
        "dlo-sp4",
        "admin:alice",
    )
    assert "dlo-dp4" in groups.fitting_profiles(after, profiles)
    assert driver.run(groups.wanted_profile, "g", "boot-1") == "dlo-sp4"
    assert driver.run(groups.wanted_profile, "g", "boot-2") is None
    driver.run(groups.set_wanted_state, "g", Wish.DRAINING, "admin:alice")
    assert driver.run(groups.wanted_profile, "g", "boot-1") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sp4", "serves sp4 already"),
        ("tiny-cpu", "tiny-cpu runs on no devices, and group g has 4; dlo-sp4, "),
        ("layerwise-1gpu", "layerwise-1gpu runs on 1 devices, and group g has 4"),
        ("auto", "profile must be auto or one of"),
    ],
)
def test_profile_that_does_not_fit_a_group_is_refused_in_words(driver, name, said):
    driver.run(groups.register, Group("g", "host-1", "sp4", "0,1,2,3", "boot-1"))
    with pytest.raises(InvalidFieldError, match=said):
        driver.run(groups.change_profile, "g", name, load_profiles(SHIPPED_PROFILES), "admin:alice")
    assert driver.sql("SELECT wanted_state, wanted_profile FROM worker_group") == [(None, None)]


def test_nobody_asks_a_group_that_has_left_for_another_profile(driver):
    driver.run(groups.register, Group("g", "host-1", "sp4", "0,1,2,3", "boot-1"))
    driver.sql("UPDATE worker_group SET state = 'gone'")
    with pytest.raises(GroupGoneError):
        driver.run(groups.change_profile, "g", "dlo-sp4", load_profiles(SHIPPED_PROFILES), "admin:alice")
