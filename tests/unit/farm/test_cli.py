"""The command line: its words, and the exit codes that scripts rely on."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from farm.cli import main, make_parser
from farm.commands.doctor import check_broker, check_database, check_store
from farm.commands.submit import fields_of
from farm.embedded.ports import free_ports
from farm.embedded.state import Access, StateDirectory


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, where neither `.env` nor a state folder is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / ".state"))
    return tmp_path


def test_submit_sends_only_what_was_given() -> None:
    words = ["submit", "A boat", "--steps", "2", "--output-width", "640", "--output-height", "360"]
    fields = fields_of(make_parser().parse_args(words))
    assert fields == {"prompt": "A boat", "num_inference_steps": 2, "output_width": 640, "output_height": 360}


def test_unknown_option_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as raised:
        main(["submit", "A boat", "--colour", "red"])
    assert raised.value.code == 2


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"magi2-farm {version('magi2-farm')}\n"


def test_submit_without_a_known_farm_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "A boat"]) == 2
    assert "magi2-farm up" in capsys.readouterr().err


def test_missing_image_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "A boat", "--image", "missing.jpg"]) == 2
    assert "missing.jpg is not a file" in capsys.readouterr().err


def test_farm_that_is_not_running_exits_3(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = f"http://127.0.0.1:{free_ports(1)[0]}"
    StateDirectory(elsewhere / ".state").keep_access(Access(closed, "mk_live_x"))
    assert main(["jobs", "list"]) == 3
    assert closed in capsys.readouterr().err


def test_bad_setting_exits_2_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_PROT", "8000")
    assert main(["config", "show"]) == 2
    assert "FARM_API_PORT" in capsys.readouterr().err


def test_config_show_masks_secrets_and_names_origins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://farm:hush@db/farm")
    monkeypatch.setenv("REDIS_URL", "redis://:hush@redis/0")
    monkeypatch.setenv("FARM_KEY_PEPPER", "hush-0123456789-abcdefghijklmnop-hush")
    assert main(["config", "show", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "hush" not in shown
    lines = {line["name"]: line for line in json.loads(shown)}
    assert lines["FARM_KEY_PEPPER"]["origin"] == "environment"
    assert lines["FARM_S3_BUCKET"]["origin"] == "default"


def test_a_tier_that_is_missing_fails_the_test_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farm.commands.test.ROOT", tmp_path)
    assert main(["test"]) == 1
    assert "tests/golden" in capsys.readouterr().err


def test_api_description_is_exported_without_a_farm(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "openapi"]) == 0
    assert "/v1/videos/{video_id}/content" in json.loads(capfd.readouterr().out)["paths"]


def test_wrong_word_is_told_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["jobs", "lst"])
    said = capsys.readouterr().err.splitlines()
    assert raised.value.code == 2
    assert len(said) == 2
    assert "invalid choice: 'lst'" in said[0]
    assert said[1] == "see magi2-farm jobs --help"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "0"], "--rate is 0; it must be above 0 and up to 50"),
        (["--rate", "51"], "--rate is 51; it must be above 0 and up to 50"),
        (["--seconds", "301"], "--seconds is 301; it must be above 0 and up to 300"),
        (["--rate", "50", "--seconds", "300"], "are 15000 requests; at most 2000 go"),
        (["--url", "https://farm.example.com"], "--allow-remote"),
    ],
)
def test_load_is_bounded_and_stays_on_this_machine(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    StateDirectory(elsewhere / ".state").keep_access(Access("http://127.0.0.1:1", "mk_live_x"))
    assert main(["loadtest", *words]) == 2
    assert said in capsys.readouterr().err


def test_load_on_a_farm_that_is_away_exits_3(elsewhere: Path) -> None:
    closed = f"http://127.0.0.1:{free_ports(1)[0]}"
    StateDirectory(elsewhere / ".state").keep_access(Access(closed, "mk_live_x"))
    assert main(["loadtest"]) == 3


@pytest.fixture
def stopped_farm(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave the state folder of an embedded farm that was started and has stopped."""
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    port = free_ports(1)[0]
    StateDirectory(elsewhere / ".state").keep_variables(
        {
            "DATABASE_URL": f"postgresql://farm:hush@127.0.0.1:{port}/farm",
            "REDIS_URL": f"redis://:hush@127.0.0.1:{port}/0",
            "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
    )
    return elsewhere / ".state"


def test_config_show_shows_the_embedded_farm(stopped_farm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json"]) == 0, stopped_farm
    shown = capsys.readouterr().out
    lines = {line["name"]: line for line in json.loads(shown)}
    assert "hush" not in shown
    assert lines["S3_ENDPOINT_URL"]["value"].startswith("http://127.0.0.1:")
    assert {lines[name]["origin"] for name in ("DATABASE_URL", "S3_ENDPOINT_URL")} == {"embedded farm"}
    assert lines["FARM_S3_BUCKET"]["origin"] == "default"


def test_doctor_looks_at_the_embedded_farm_and_says_to_start_it(
    stopped_farm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farm.commands.doctor.CHECKS", (check_database, check_broker, check_store))
    monkeypatch.setattr("farm.commands.doctor.MACHINE_CHECKS", ())
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert {finding["is_ok"] for finding in findings} == {False}
    assert {finding["fix"] for finding in findings} == {
        f"start the embedded farm of {stopped_farm} with ./magi2-farm up"
    }


def test_groups_of_a_farm_that_has_stopped_name_it(
    stopped_farm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["groups", "list"]) == 3
    said = capsys.readouterr().err
    assert f"start the embedded farm of {stopped_farm} with ./magi2-farm up" in said
    assert "DATABASE_URL" not in said


@pytest.mark.parametrize("words", [["doctor"], ["config", "show"], ["groups", "list"], ["bucket", "check"]])
def test_without_any_farm_the_ways_to_get_one_are_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "DATABASE_URL is not set" in said
    assert "start the embedded farm with ./magi2-farm up" in said


def test_profiles_are_checked_without_a_farm_and_a_file_is_named_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL", "FARM_PROFILES_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["profiles", "check", "--json"]) == 0
    monkeypatch.setenv("FARM_PROFILES_FILE", "/nope.yaml")
    assert main(["profiles", "check"]) == 1
    assert "FARM_PROFILES_FILE /nope.yaml cannot be read" in capsys.readouterr().err
    assert main(["profiles", "check", "/none.yaml"]) == 1
    assert "magi2-farm: file /none.yaml cannot be read" in capsys.readouterr().err
