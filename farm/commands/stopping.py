"""Turn SIGTERM and SIGINT into one exception, so that `finally` stops the farm however the command ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(BaseException):
    """Somebody asked the command to end; not an Exception, lest something takes it for an error."""


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raise `StopRequested` at the first signal; later ones are ignored while the farm stops."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise StopRequested

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
