"""The failures that the engine raises on purpose, as one small tree.

A caller can fix `InvalidInput`, `LayoutError` and `CheckpointError`: they are raised before any collective
and identically on every rank, and their text names the value, the limit and the remedy. `OutOfMemory` and
`EngineError` are the engine's own; `Stopped` is no failure but the answer to a request to stop. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magi2.contract import Problem

_MIB = 1024 * 1024


class EngineFailure(Exception):  # noqa: N818 - not all of the tree are errors
    """A failure that the engine names; every other exception is a defect."""


class InvalidInput(EngineFailure):
    """The request breaks a rule of the contract.

    Args:
        problems: All broken rules, or one sentence where no field is to blame.
    """

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems: list[Problem] = [] if isinstance(problems, str) else list(problems)
        super().__init__(problems if isinstance(problems, str) else "; ".join(p.message for p in problems))


class LayoutError(EngineFailure):
    """The parallel layout cannot run: the message names the flag and the remedy."""


class CheckpointError(EngineFailure):
    """The checkpoint folder does not hold what the engine needs.

    Args:
        problems: Every missing, unexpected or misshapen file and tensor, one sentence each; or one sentence.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class OutOfMemory(EngineFailure):
    """A device or the host has less memory than the request needs.

    Args:
        free_bytes: What was free.
        needed_bytes: What was asked for.
        where: The device, as torch spells it, or "host".
    """

    def __init__(self, free_bytes: int, needed_bytes: int, where: str = "device") -> None:
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes
        self.where = where
        super().__init__(free_bytes, needed_bytes, where)

    def __str__(self) -> str:
        return (
            f"out of memory on {self.where}: {self.needed_bytes // _MIB} MiB needed, "
            f"{self.free_bytes // _MIB} MiB free; use a smaller tier or a layout with less memory per device"
        )


class EngineError(EngineFailure):
    """The engine failed or was used in a way that it forbids."""


class PeerLost(EngineFailure):
    """A collective failed because another rank is gone or late; this process must end too."""


class Stopped(EngineFailure):
    """The caller asked the engine to stop, and it did so at a step boundary."""
