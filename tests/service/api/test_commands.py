"""The commands that speak to the API, against a real server: what they print, and their exit codes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from farm.cli import main
from tests.service.api.conftest import CLIP, SUBMIT, Farm, Served

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def url(serve: Callable[[], Served]) -> str:
    return serve().url


@pytest.fixture
def run(farm: Farm, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with URL and key; return its exit code and what it printed."""
    key_file = tmp_path / "key"

    def start(*words: str, key: str = farm.key) -> tuple[int, str]:
        key_file.write_text(key)
        capsys.readouterr()
        code = main([*words, "--url", url, "--key-file", str(key_file)])
        # The server of this process logs to the same place, a line at a time.
        lines = capsys.readouterr().out.splitlines()
        return code, "\n".join(line for line in lines if not re.match(r"\d{4}-", line))

    return start


@pytest.fixture
def submitted(farm: Farm, url: str) -> str:
    answer = httpx.post(f"{url}/v1/videos", json=SUBMIT, headers={"Authorization": f"Bearer {farm.key}"})
    return str(answer.json()["id"])


def test_canceled_job_is_retried_with_another_seed(run: Run, submitted: str) -> None:
    before = json.loads(run("jobs", "show", submitted, "--json")[1])["seed"]
    assert run("jobs", "cancel", submitted)[0] == 0
    code, out = run("jobs", "retry", submitted, "--new-seed", "--priority", "low", "--json")
    again = json.loads(out)
    assert (code, again["state"], again["priority"]) == (0, "queued", -5)
    assert again["seed"] != before
    assert run("jobs", "retry", submitted)[0] == 1


def test_shown_job_has_its_attempts(run: Run, farm: Farm, submitted: str) -> None:
    assert json.loads(run("jobs", "show", submitted, "--json")[1])["attempts"] == []
    farm.finish()
    shown = json.loads(run("jobs", "show", submitted, "--json")[1])
    [attempt] = shown["attempts"]
    assert (shown["id"], attempt["group"], attempt["outcome"]) == (submitted, "g1", "succeeded")
    *_, names, values = run("jobs", "show", submitted)[1].splitlines()
    assert names.split()[:3] == ["attempt", "group", "profile"]
    assert values.split()[:2] == ["1", "g1"]
    assert "succeeded" in values


def test_time_that_is_over_does_not_lose_the_id(run: Run, farm: Farm) -> None:
    submit = ("submit", "a fox", "--size", "448x256", "--wait", "--timeout", "0.1")
    code, out = run(*submit, "--json")
    assert (code, json.loads(out)["state"]) == (124, "queued")
    assert run(*submit)[1].startswith("video_")
    assert farm.num_jobs() == 2


def test_tail_follows_a_job_to_its_end_and_tells_it_by_its_exit_code(
    run: Run, farm: Farm, submitted: str
) -> None:
    farm.finish()
    code, out = run("jobs", "tail", submitted, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[0])["event"] == "snapshot"
    other = json.loads(run("submit", "a fox", "--size", "448x256", "--json")[1])["id"]
    run("jobs", "cancel", other)
    assert run("jobs", "tail", other)[0] == 1


def test_submit_waits_and_writes_the_clip(
    run: Run, farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "farm.commands.progress.ProgressLines.show", lambda *_: farm.num_jobs() and _finish(farm)
    )
    target = tmp_path / "out.mp4"
    code, out = run("submit", "a fox", "--size", "448x256", "-o", str(target), "--json")
    assert (code, json.loads(out)["status"], target.read_bytes()) == (0, "completed", CLIP)


def _finish(farm: Farm) -> None:
    if farm.execute("SELECT 1 FROM job WHERE state = 'queued'"):
        farm.finish()


def test_profiles_and_webhooks_are_listed(run: Run, farm: Farm, url: str) -> None:
    profiles = json.loads(run("profiles", "list", "--json")[1])
    assert "tiny-cpu" in [profile["name"] for profile in profiles]
    assert {profile["paused"] for profile in profiles} == {False}
    assert "tiny-cpu" in run("profiles", "list")[1]
    names, values, *_ = run("profiles", "list")[1].splitlines()
    assert (names.split()[1], values.split()[1]) == ("paused", "no")
    body = {"url": "https://hooks.example.com/", "name": "studio"}
    headers = {"Authorization": f"Bearer {farm.key}"}
    endpoint = httpx.post(f"{url}/v1/webhook_endpoints", json=body, headers=headers).json()["id"]
    assert endpoint in run("webhooks", "list")[1]
    assert json.loads(run("webhooks", "list", endpoint, "--status", "dead", "--json")[1]) == []
    assert run("webhooks", "replay", "whd_1")[0] == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("submit", "a fox", "--steps", "0"), 2),
        (("submit", "a fox", "--size", "448x256", "--wait", "--timeout", "0.1"), 124),
        (("jobs", "show", "video_1"), 1),
    ],
)
def test_exit_codes_are_those_of_the_failure(run: Run, words: tuple[str, ...], code: int) -> None:
    assert run(*words)[0] == code


def test_refused_key_exits_4(run: Run) -> None:
    assert run("jobs", "list", key="mk_live_x")[0] == 4


def test_load_is_measured_and_leaves_nothing_to_render(run: Run, farm: Farm) -> None:
    code, out = run("loadtest", "--rate", "20", "--seconds", "0.5", "--json")
    figures = {row["what"]: row for row in json.loads(out)["rows"]}
    assert code == 0
    assert figures["submit"]["requests"] == figures["read"]["requests"] == 10
    assert figures["submit"]["refused"] == figures["read"]["refused"] == 0
    assert figures["submit"]["p99_ms"] >= figures["submit"]["p50_ms"] > 0
    assert farm.execute("SELECT state, count(*) FROM job GROUP BY state") == [("canceled", 10)]


def test_load_that_is_refused_exits_1_and_says_why(run: Run, farm: Farm) -> None:
    farm.execute("""UPDATE account SET limits = '{"max_queued": 3}'""")
    code, out = run("loadtest", "--rate", "20", "--seconds", "0.25", "--json")
    (submitted, _) = json.loads(out)["rows"]
    assert code == 1
    assert submitted["reasons"] == {"queue_full": 2}
    assert farm.execute("SELECT count(*) FROM job WHERE state <> 'canceled'") == [(0,)]


def test_load_with_a_wrong_key_exits_4_before_anything_is_sent(run: Run, farm: Farm) -> None:
    assert run("loadtest", key="mk_live_x")[0] == 4
    assert farm.num_jobs() == 0
