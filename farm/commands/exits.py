"""Exit codes of `magi2-farm`, and the error that carries one."""

from enum import IntEnum


class Exit(IntEnum):
    """What the exit code of a command means; scripts rely on it."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    AUTH = 4
    INTERRUPTED = 130
    TIMEOUT = 124


class CommandError(Exception):
    """A command cannot go on; the message says what to change."""

    def __init__(self, message: str, code: Exit = Exit.FAILED, reason: str | None = None) -> None:
        """Take the sentence for the person, the exit code for the script, and the API's code of a refusal."""
        super().__init__(message)
        self.code = code
        self.reason = reason
