"""What README.md and docs/operations.md print for users to type is typed here, against a real farm."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farm.cli import main
from tests.architecture.tree import text_of
from tests.compose_file import ROOT
from tests.service.api.conftest import CLIP, Farm, Served, farm, image_bytes, serve

__all__ = ["farm", "serve"]  # fixtures of the API's tests

WAIT_S = 120


def lines_of(page: str, word: str) -> list[str]:
    """Return the lines of the code blocks of a page that begin with a word."""
    blocks = re.findall(r"^```\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(word)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with the picture that the page names."""
    (tmp_path / "boat.jpg").write_bytes(image_bytes("JPEG"))
    return tmp_path


@pytest.fixture
def rendering(farm: Farm) -> Iterator[None]:
    """Finish every job that comes, as a worker would."""
    stop = threading.Event()

    def finish() -> None:
        while not stop.wait(0.2):
            if farm.execute("SELECT id FROM job WHERE state = 'queued'"):
                farm.finish()

    thread = threading.Thread(target=finish)
    thread.start()
    yield
    stop.set()
    thread.join(WAIT_S)


def bash(line: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line], cwd=cwd, env={**os.environ, **variables},
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_lines_submit_follow_and_fetch_a_clip(
    farm: Farm, serve: Callable[..., Served], place: Path
) -> None:
    submit, show, fetch = lines_of("README.md", "curl")
    farm.execute("DELETE FROM worker_group WHERE profile <> 'tiny-cpu'")
    known = {"URL": serve().url, "KEY": farm.key, "NO_PROXY": "127.0.0.1"}
    video = json.loads(bash(submit, place, **known))
    assert video["has_input_reference"]
    known["ID"] = video["id"]
    with pytest.raises(AssertionError, match="409"):
        bash(fetch, place, **known)
    assert not (place / "clip.mp4").exists()
    farm.finish()
    assert json.loads(bash(show, place, **known))["status"] == "completed"
    bash(fetch, place, **known)
    assert (place / "clip.mp4").read_bytes() == CLIP


@pytest.mark.usefixtures("rendering")
def test_lines_of_the_command_line_submit_wait_and_list(
    farm: Farm, serve: Callable[..., Served], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "key").write_text(farm.key)
    where = ["--url", serve().url, "--key-file", str(place / "key")]
    monkeypatch.chdir(place)
    lines = [*lines_of("README.md", "./magi2-farm submit"), *lines_of("README.md", "./magi2-farm jobs")]
    assert len(lines) == 3
    for line in lines:
        assert main([*shlex.split(line, comments=True)[1:], *where]) == 0, line
    assert (place / "lighthouse.mp4").read_bytes() == CLIP


@pytest.mark.usefixtures("settings")
def test_lines_of_an_operator_make_schema_bucket_key_and_login(
    new_database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", new_database("template1"))
    wanted = ("migrate", "bucket init", "key create", "admin create")
    lines = [lines_of("docs/operations.md", f"magi2-farm {words}")[0] for words in wanted]
    logins = lines_of("docs/operations.md", "./magi2-farm admin")
    assert len(logins) == 4
    for line in [*lines, *logins]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("a long and private phrase\n"))
        arguments = shlex.split(line, comments=True)[1:]
        assert main([word.replace("NAME", "ada") for word in arguments]) == 0, line
    assert "mk_" in capsys.readouterr().out


def test_the_page_says_what_a_lost_worker_costs() -> None:
    text = (ROOT / "README.md").read_text()
    assert "step 95 of 100" in text
