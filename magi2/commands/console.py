"""What a command says: results on stdout, everything else on stderr, failures one line each.

Torch-free. Progress is drawn for people at a terminal; where stderr is none, only the finished phases appear.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from magi2.errors import CheckpointError, EngineFailure, InvalidInput, LayoutError


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
    TERMINATED = 143


def say(text: str) -> None:
    """Print a result."""
    print(text)


def note(text: str) -> None:
    """Print a remark."""
    print(text, file=sys.stderr)


def refuse(failure: EngineFailure) -> Exit:
    """Print every reason of a failure and return the exit code that it means."""
    if isinstance(failure, InvalidInput):
        return refuse_usage([problem.message for problem in failure.problems] or [str(failure)])
    if isinstance(failure, LayoutError):
        return refuse_usage([str(failure)])
    if isinstance(failure, CheckpointError):
        for problem in failure.problems:
            note(f"checkpoint: {problem}")
        note(f"magi2: the checkpoint cannot be used: {counted(len(failure.problems), 'problem')}")
    else:
        note(f"magi2: {failure}")
    return Exit.FAILED


def refuse_usage(reasons: Sequence[str]) -> Exit:
    """Print what is wrong with what was asked, one line each."""
    for reason in reasons:
        note(f"magi2: {reason}")
    return Exit.USAGE


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class PhaseBars:
    """One bar for each phase of a render, in the order in which phases report themselves."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def __call__(self, phase: str, finished: int, total: int) -> None:
        """Report a phase: a `ProgressFn`."""
        if phase not in self._bars:
            self._bars[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._bars[phase], completed=finished, total=total)


@contextmanager
def phase_bars() -> Iterator[PhaseBars]:
    """Draw phases on stderr while the block runs."""
    columns = (TextColumn("{task.description:<13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield PhaseBars(progress)
