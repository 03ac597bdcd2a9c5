"""`qualify` on the tiny checkpoint, at a tier of few tokens: records, the table, going on, refusals."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import av
import pytest

from magi2.commands import qualify_record
from magi2.contract import TIERS, Tier

PROFILE = "tiny-cpu"


@pytest.fixture
def qualify(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch, tiny_root: Path, tmp_path: Path
) -> Callable[..., object]:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 128, 64, 4))

    def run(*words: object, checkpoint: Path = tiny_root) -> object:
        places = ("--checkpoint", checkpoint, "--output", tmp_path / "out", "--device", "cpu")
        return magi2("qualify", "--profile", PROFILE, *places, *words)

    return run


def record_of(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "out" / PROFILE / f"{name}.json").read_text())


def test_runs_are_measured_recorded_and_not_repeated(qualify: Callable, tmp_path: Path) -> None:
    outcome = qualify("--only", "*-272p-1")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 2
    for name, has_image in (("t2va-272p-1", False), ("i2va-272p-1", True)):
        record = record_of(tmp_path, name)
        assert record["run"] == name
        assert record["profile"] == PROFILE
        assert record["layout"] == "one rank"
        assert (record["request"]["has_image"], record["image_sha256"] is not None) == (has_image, has_image)
        assert len(record["engine_revision"]) == len(record["checkpoint_revision"]) == 64
        assert {"text_encode", "denoise", "decode_video", "decode_audio", "mux"} <= set(record["stage_s"])
        assert 0 < sum(record["stage_s"].values()) <= record["end_to_end_s"]
        assert record["peak_device_memory_mb"] is None
        assert record["peak_host_pss_mb"] > 100
        assert record["is_measured"] is True
        assert record["num_memory_samples"] >= 1
        assert record["probe"]["breaches"] == []
        clip = tmp_path / "out" / PROFILE / f"{name}.mp4"
        with av.open(str(clip)) as container:
            assert sum(1 for _ in container.decode(video=0)) == 125
    table = (tmp_path / "out" / PROFILE / "table.md").read_text().splitlines()
    assert len(table) == 4
    assert record_of(tmp_path, "t2va-272p-1")["frames_sha256"] in table[2]
    assert record_of(tmp_path, "i2va-272p-1")["samples_sha256"] in table[3]

    before = record_of(tmp_path, "t2va-272p-1")
    again = qualify("--only", "t2va-272p-1", "--only", "t2va-272p-4")
    assert again.code == 0, again.err
    assert "t2va-272p-1 is recorded already" in again.err
    assert record_of(tmp_path, "t2va-272p-1") == before
    assert len(again.out.splitlines()) == 1
    assert len((tmp_path / "out" / PROFILE / "table.md").read_text().splitlines()) == 5


def test_equal_runs_give_equal_digests(qualify: Callable, tmp_path: Path) -> None:
    digests = []
    for _ in range(2):
        assert qualify("--only", "t2va-272p-1").code == 0
        record = record_of(tmp_path, "t2va-272p-1")
        digests.append((record["frames_sha256"], record["samples_sha256"]))
        (tmp_path / "out" / PROFILE / "t2va-272p-1.json").unlink()
    assert digests[0] == digests[1]
    assert digests[0][0] != hashlib.sha256(b"").hexdigest()


def test_record_of_another_engine_is_refused_before_loading(qualify: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "out" / PROFILE
    folder.mkdir(parents=True)
    (folder / "t2va-272p-1.json").write_text(json.dumps({"run": "t2va-272p-1", "profile": "sp4"}))
    outcome = qualify("--only", "t2va-272p-4")
    assert outcome.code == 2
    assert "holds the record t2va-272p-1 with another profile (sp4; now tiny-cpu)" in outcome.err


def test_runs_beyond_the_caps_of_the_profile_are_left_out_by_name(qualify: Callable) -> None:
    outcome = qualify("--only", "*-540p-*", "--only", "*-100")
    assert outcome.code == 0
    left_out = [line for line in outcome.err.splitlines() if "is left out" in line]
    assert len(left_out) == 8
    assert "t2va-540p-1 is left out: profile tiny-cpu takes at most 272p and 20 steps" in left_out
    assert "0 new runs" in outcome.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--only", "t2v"], "--only t2v fits no run; there are t2va-272p-1,"),
        (["--profile", "sp5"], "--profile sp5: profiles.yaml has no such row"),
        (["--tp", "3"], "--tp"),
    ],
)
def test_broken_rule_is_refused_with_its_flag(qualify: Callable, words: list[str], line: str) -> None:
    outcome = qualify(*words)
    assert outcome.code == 2
    assert line in outcome.err


def test_output_where_nothing_can_be_made_is_refused_before_loading(
    qualify: Callable, tmp_path: Path
) -> None:
    (tmp_path / "out").touch()
    outcome = qualify("--only", "t2va-272p-1")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "out: no file can be made there: Not a directory" in outcome.err


def test_profile_is_required(magi2: Callable, tiny_root: Path) -> None:
    outcome = magi2("qualify", "--checkpoint", tiny_root)
    assert outcome.code == 2
    assert "--profile is required" in outcome.err


def test_there_are_twelve_runs() -> None:
    assert len({run.name for run in qualify_record.RUNS}) == 12
    assert {run.num_steps for run in qualify_record.RUNS} == {1, 4, 100}
