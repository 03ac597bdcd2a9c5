"""Signals to a command that is writing a clip: it unwinds, leaves nothing and says one line."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from magi2.commands import generate, interrupts
from magi2.commands.interrupts import Terminated

# The whole command but for the model: a clip of which the first frames are there.
COMMAND = """
import runpy, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
from magi2.commands import generate

def render(arguments, written):
    import torch
    from magi2.media.writer import ClipWriter

    with ClipWriter(arguments.output) as writer:
        writer.begin(torch.zeros(441_000, 2), (64, 64), None)
        writer.add(torch.zeros(25, 64, 64, 3, dtype=torch.uint8))
        time.sleep(3600)

generate._run = render
runpy.run_module("magi2", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "times", "code", "line"),
    [
        (signal.SIGTERM, 1, 143, "magi2: terminated; no file was written\n"),
        (signal.SIGINT, 20, 130, "magi2: interrupted; no file was written\n"),
    ],
    ids=["SIGTERM", "Ctrl-C again and again"],
)
def test_signal_unwinds_the_command(tmp_path: Path, number: int, times: int, code: int, line: str) -> None:
    words = [sys.executable, "-c", COMMAND, "generate", "--output", str(tmp_path / "clip.mp4")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as command:
        while not list(tmp_path.iterdir()) and command.poll() is None:
            time.sleep(0.02)
        for _ in range(times):
            command.send_signal(number)
            time.sleep(0.03)
        _, said = command.communicate()
    assert (command.returncode, said) == (code, line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt, 130, "magi2: interrupted; no file was written"),
        (Terminated, 143, "magi2: terminated; no file was written"),
    ],
)
def test_interrupt_is_told_by_the_first_rank_alone(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int, line: str
) -> None:
    def render(_arguments: object, _written: object) -> None:
        raise error

    monkeypatch.setattr(generate, "_run", render)
    outcome = magi2("generate")
    assert (outcome.code, outcome.err) == (code, f"{line}\n")
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    outcome = magi2("generate")
    assert (outcome.code, outcome.err) == (code, "")


def test_interrupt_after_the_file_says_so(magi2: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(_arguments: object, written: list[Path]) -> None:
        written.append(Path("clip.mp4"))
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_run", render)
    assert magi2("generate").err == "magi2: interrupted; clip.mp4 is complete\n"


def test_second_signal_counts_only_when_the_first_was_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    take = interrupts._Taker()
    with pytest.raises(KeyboardInterrupt):
        take(signal.SIGINT, None)
    take(signal.SIGTERM, None)  # a launcher sends it after the terminal's Ctrl-C
    now[0] += interrupts._UNWINDING_S
    with pytest.raises(Terminated):
        take(signal.SIGTERM, None)
