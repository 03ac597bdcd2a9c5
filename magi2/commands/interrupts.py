"""Ctrl-C and SIGTERM: both unwind the command, so that nothing unfinished stays, and end in its exit code.

Promises: what comes while the command unwinds is ignored, as a launcher and an impatient person send more
than one signal; a command that has not ended by then can be interrupted again. A signal that whoever started
the process had ignored stays ignored.
"""

import signal
import time
from types import FrameType

from magi2.commands.console import Exit, note
from magi2.config import read_launch

_UNWINDING_S = 5.0


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


class _Taker:
    """Raises for the first signal and again for one that comes much later."""

    def __init__(self) -> None:
        self._raised_at: float | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._raised_at is not None and now - self._raised_at < _UNWINDING_S:
            return
        self._raised_at = now
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def take_signals() -> None:
    """Let signals end this process by an exception in its main thread."""
    taker = _Taker()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, taker)


def ignore_signals() -> None:
    """Let nothing change the exit code any more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def tell_interrupt(interrupt: KeyboardInterrupt) -> Exit:
    """Say on the first rank that the command was interrupted, with the exception's notes; return its code."""
    is_term = isinstance(interrupt, Terminated)
    if _is_first():
        note(
            "; ".join(
                [
                    "magi2: terminated" if is_term else "magi2: interrupted",
                    *getattr(interrupt, "__notes__", []),
                ]
            )
        )
    return Exit.TERMINATED if is_term else Exit.INTERRUPTED


def _is_first() -> bool:
    try:
        return read_launch().rank == 0
    except ValueError:
        return True
