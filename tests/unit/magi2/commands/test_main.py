"""The command line as a whole: what it loads, what it refuses, and `probe` on files that are no clip."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LOADED = "import sys; from magi2.__main__ import main; {}; print('torch' in sys.modules)"
REFUSED = "main(['generate', '--prompt', ' '])"
PROBED = "main(['probe', 'absent.mp4'])"
HELP = "sys.argv"


@pytest.mark.parametrize("call", [HELP, PROBED, REFUSED], ids=["import", "probe", "a refused request"])
def test_torch_is_not_loaded(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(call)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["probe", "--help"]])
def test_help_is_given(words: list[str], magi2: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        magi2(*words)
    assert left.value.code == 0
    assert "usage: python -m magi2" in capsys.readouterr().out


def test_unknown_command_is_a_usage_error(magi2: Callable) -> None:
    with pytest.raises(SystemExit) as left:
        magi2("render")
    assert left.value.code == 2


def test_unknown_flag_names_the_help_of_its_command(
    magi2: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        magi2("generate", "--resolutoin", "272p")
    assert left.value.code == 2
    want = [
        "magi2: unrecognized arguments: --resolutoin 272p",
        "magi2: see python -m magi2 generate --help",
    ]
    assert capsys.readouterr().err.splitlines() == want


def test_unknown_setting_in_the_environment_is_refused(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGI2_CKPT_ROTT", "x")
    outcome = magi2("verify-checkpoint")
    assert outcome.code == 2
    assert "nearest name is MAGI2_CKPT_ROOT" in outcome.err


def test_probe_of_no_video_fails_in_one_line(magi2: Callable, tmp_path: Path) -> None:
    (tmp_path / "note.mp4").write_text("no video", encoding="utf-8")
    outcome = magi2("probe", tmp_path / "note.mp4")
    assert (outcome.code, len(outcome.err.splitlines()), outcome.out) == (1, 1, "")


def test_probe_prints_the_facts_and_names_each_breach(magi2: Callable, short_clip: Path) -> None:
    outcome = magi2("probe", short_clip)
    assert outcome.code == 1
    assert json.loads(outcome.out)["codec_types"] == ["video"]
    assert "number of frames is 5, not 125" in outcome.err


@pytest.fixture
def short_clip(tmp_path: Path) -> Path:
    import av
    import numpy as np

    path = tmp_path / "short.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(5):
            picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return path
