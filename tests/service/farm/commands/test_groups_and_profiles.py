"""`groups` and `profiles` of an operator: what they print and change, exit codes, the audit log."""

import json
from pathlib import Path

import pytest

from farm import audit, groups, profile_control
from farm.audit import AuditQuery
from farm.cli import main
from farm.commands.doctor import check_groups
from farm.settings import SHIPPED_PROFILES


@pytest.fixture
def group(driver) -> str:
    driver.register("group_a", "tiny-cpu", state="busy")
    driver.sql("""UPDATE worker_group SET stats = '{"busy_1h": 0.5, "sick_reason": ""}'""")
    driver.submit()
    driver.claim("group_a")
    return "group_a"


def actions(driver) -> list[tuple[str, str, str]]:
    entries = driver.run(audit.list_entries, AuditQuery()).entries
    return [(entry.actor, entry.action, entry.target) for entry in entries]


def test_groups_are_listed_with_what_they_work_on(driver, group, capsys):
    driver.register("group_b", "sp4", state="gone")
    assert main(["groups", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["id"], listed["state"], listed["is_live"]) == (group, "busy", True)
    assert listed["jobs"][0]["progress"] == 0
    assert main(["groups", "list", "--gone"]) == 0
    shown = capsys.readouterr().out
    assert "group_b" in shown
    assert listed["jobs"][0]["id"] in shown


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["drain"], "draining"),
        (["drain", "--now"], "leaving"),
        (["pause"], "paused"),
        (["restart"], "restarting"),
        (["undrain"], None),
    ],
)
def test_a_wish_is_written_for_the_agent_to_read(driver, group, capsys, words, wanted):
    verb, *options = words
    assert main(["groups", verb, group, *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["wanted_state"], shown["wanted_by"]) == (wanted, "system:cli")
    assert driver.run(groups.heartbeat, group, f"boot-of-{group}", "busy") == wanted
    assert actions(driver) == [("system:cli", f"group.{verb}", group)]


@pytest.mark.usefixtures("group")
def test_a_group_that_is_not_there_is_a_wrong_word_and_one_that_left_a_failure(driver, capsys):
    assert main(["groups", "drain", "group_x"]) == 2
    assert "those that are there: group_a" in capsys.readouterr().err
    driver.register("group_b", "sp4", state="gone")
    assert main(["groups", "drain", "group_b"]) == 1
    assert "start its worker again" in capsys.readouterr().err
    assert actions(driver) == []


def test_a_profile_is_paused_and_resumed(driver, capsys):
    assert main(["profiles", "pause", "tiny-cpu", "--reason", "new weights"]) == 0
    assert "tiny-cpu is paused" in capsys.readouterr().out
    control = driver.run(profile_control.get_control, "tiny-cpu")
    assert (control.paused, control.paused_reason, control.changed_by) == (True, "new weights", "system:cli")
    assert main(["profiles", "resume", "tiny-cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paused"] is False
    assert [action for _, action, _ in actions(driver)] == ["profile.resume", "profile.pause"]
    assert main(["profiles", "pause", "tiny"]) == 2
    assert "tiny-cpu" in capsys.readouterr().err


def test_doctor_names_a_sick_group_and_why(driver, group, settings):
    assert check_groups(settings).is_ok
    driver.run(
        groups.heartbeat, group, f"boot-of-{group}", "sick", None, {"sick_reason": "device 1 is missing"}
    )
    finding = check_groups(settings)
    assert not finding.is_ok
    assert f"{group} on host: device 1 is missing" in finding.message


@pytest.mark.usefixtures("settings")
def test_the_file_of_profiles_is_checked(tmp_path: Path, capsys):
    assert main(["profiles", "check", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["profiles"]}
    assert (rows["dlo-dp4"]["wave_size"], rows["sp4"]["ranks"]) == (4, 4)
    broken = tmp_path / "profiles.yaml"
    broken.write_text(SHIPPED_PROFILES.read_text().replace("ulysses: 4", "ulysses: 3", 1))
    assert main(["profiles", "check", str(broken)]) == 1
    assert "sp4" in capsys.readouterr().err
    assert main(["profiles", "check", str(tmp_path / "absent.yaml")]) == 1
