"""Where a file may go: what is refused before it is made, and what is followed."""

import os
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from magi2.media import target
from magi2.media.target import beside, followed, why_no_file, why_no_folder

Usage = namedtuple("Usage", "total used free")


def folder(at: Path) -> Path:
    at.mkdir()
    return at


def pipe(at: Path) -> Path:
    os.mkfifo(at)
    return at


def bound_socket(at: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(at))
    return at


def circle(at: Path) -> Path:
    at.symlink_to(at)
    return at


def link_to_a_pipe(at: Path) -> Path:
    at.symlink_to(pipe(at.with_name("pipe")))
    return at


def below_a_file(at: Path) -> Path:
    at.touch()
    return at / "clip.mp4"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda _at: Path(), "it is a folder"),
        (lambda _at: Path("/"), "it is a folder"),
        (lambda at: at.parent / "absent" / "..", "it is a folder"),
        (folder, "it is a folder; name a file"),
        (pipe, "it is a pipe"),
        (link_to_a_pipe, "it is a pipe"),
        (bound_socket, "it is a socket"),
        (lambda _at: Path("/dev/null"), "it is a device"),
        (circle, "lead in a circle"),
        (lambda at: at / "absent" / "clip.mp4", "the folder does not exist"),
        (lambda at: at.with_name("x" * 256), "File name too long"),
        (below_a_file, "Not a directory"),
        (lambda _at: Path("/proc/clip.mp4"), "no file can be made there"),
    ],
)
def test_unusable_target_is_refused_in_one_line(
    tmp_path: Path, made: Callable[[Path], Path], why: str
) -> None:
    told = why_no_file(made(tmp_path / "given"))
    assert told is not None
    assert why in told
    assert "\n" not in told


@pytest.mark.parametrize("name", ["clip.mp4", "x" * 217, "x" * 255])
def test_legal_name_is_taken_and_the_trial_leaves_nothing(tmp_path: Path, name: str) -> None:
    assert why_no_file(tmp_path / name) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).write_bytes(b"older")
    assert why_no_file(tmp_path / name) is None
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"older")]


def test_link_stands_for_the_file_that_it_names(tmp_path: Path) -> None:
    real = folder(tmp_path / "real") / "clip.mp4"
    (tmp_path / "link.mp4").symlink_to("real/clip.mp4")
    assert followed(tmp_path / "link.mp4") == real.resolve()  # though it is not there yet
    real.touch()
    assert followed(tmp_path / "link.mp4") == real.resolve()


def test_unfinished_file_is_hidden_short_unique_and_in_the_same_folder(tmp_path: Path) -> None:
    first, second = (beside(tmp_path / ("x" * 255)) for _ in range(2))
    assert first != second
    assert first.parent == tmp_path
    assert first.name.startswith(".")
    assert len(first.name) < 32


@pytest.mark.parametrize(
    ("total", "free", "is_refused"),
    [(2**30, 2**26 - 1, True), (2**30, 2**26, False), (0, 0, False)],
    ids=["too little", "enough", "a file system that does not say"],
)
def test_too_little_space_is_refused_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, *, is_refused: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(total, total - free, free))
    for told in (why_no_file(tmp_path / "clip.mp4"), why_no_folder(tmp_path)):
        assert (told is not None) == is_refused
        assert told is None or "63 MiB are free there and 64 MiB are required" in told


def test_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(_path: Path, *, exist_ok: bool) -> None:
        raise OSError(30, f"Read-only file system, {exist_ok}")

    monkeypatch.setattr(Path, "touch", touch)  # whoever runs this may be root, who may write everywhere
    for told in (why_no_file(tmp_path / "clip.mp4"), why_no_folder(tmp_path)):
        assert told is not None
        assert "Read-only file system" in told


def test_folder_is_made_or_refused(tmp_path: Path) -> None:
    assert why_no_folder(tmp_path / "a" / "b") is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert "Not a directory" in (why_no_folder(below_a_file(tmp_path / "file")) or "")


def test_least_space_is_more_than_a_clip_of_noise_takes() -> None:
    assert target.MIN_FREE_BYTES > 4 * 2_588_197  # at 272p, times the pixels of 540p
