"""What happens to a job whose attempt failed: the failure table, as one pure function.

Nothing here reads a clock, a database or a random number; `farm/jobs/lifecycle.py` supplies them and does what
is decided.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """In which way an attempt ended without a result."""

    INVALID_INPUT = "invalid_input"  # found late: only a worker could see it
    ENGINE_ERROR = "engine_error"  # the engine raised, or its file failed the self-check
    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"  # a rank died, or a collective or a device failed
    AGENT_LOST = "agent_lost"  # the lease ran out
    UPLOAD = "upload"  # the store refused five times in a row
    PREEMPTED = "preempted"  # drain
    DEADLINE = "deadline"  # the attempt took longer than it may
    INTERNAL = "internal"  # a defect of the farm itself


@dataclass(frozen=True)
class Failure:
    """How an attempt ended.

    `message` is shown to the user, so it holds no path, host or exception text (only INVALID_INPUT needs one);
    `detail` is for operators: exception text, log tail, exit codes. `roomier_profile` is where a job that ran out
    of memory may run instead (`Profiles.roomier`), if there is such a place.
    """

    kind: FailureKind
    message: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    roomier_profile: str | None = None
