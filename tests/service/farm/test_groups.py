"""Groups: registration, heartbeats, and what counts as live."""

import pytest

from farm import groups
from farm.errors import NotFoundError
from farm.groups import Group


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
