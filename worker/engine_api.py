"""What the farm asks of an engine, and nothing more.

An engine lives in a rank process and is chosen by name. The farm hands it plain data (a validated
request as JSON, paths of files on this host) and gets back a file and figures, or one of four typed
errors; anything else that an engine raises counts as a crash of the rank. This module imports no engine
and no torch.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

ENGINES = {
    "magi2": "worker.engines.magi2",
    "null": "worker.engines.null",
    "chaos": "worker.engines.chaos",
}


@dataclass(frozen=True)
class LoadSpec:
    """What one rank needs to load its engine.

    `master_port` is where the ranks meet on loopback; `layout` holds the profile's flags of the engine.
    """

    profile: str
    rank: int
    world: int
    devices: tuple[int, ...]
    ckpt_root: str | None
    deterministic: bool
    master_port: int = 0
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RenderRequest:
    """One clip to make: the validated request, its input image if any, and where the mp4 goes.

    `slot` is its place in a wave: the data-parallel coordinate of the ranks that render it.
    """

    request_id: str
    request: Mapping[str, Any]
    image_path: str | None
    output_path: str
    slot: int = 0


@dataclass(frozen=True)
class RenderResult:
    """A finished mp4 and the engine's own account of it (durations, memory, conditioning, flags)."""

    path: str
    stats: Mapping[str, Any] = field(default_factory=dict)


class EngineFault(Exception):  # noqa: N818 - not all of the tree are errors
    """One of the four ways in which a request may end without a file and without a crash."""

    kind = "engine_error"

    def details(self) -> dict[str, Any]:
        """Return what crosses the pipe beside kind and message."""
        return {}


class InvalidInput(EngineFault):
    """The request breaks a rule that only a worker can check; trying again cannot help."""

    kind = "invalid_input"

    def __init__(self, problems: Sequence[Mapping[str, str]]) -> None:
        self.problems = [dict(problem) for problem in problems]
        super().__init__("; ".join(problem["message"] for problem in self.problems) or "invalid input")

    def details(self) -> dict[str, Any]:
        """Return the problems as field, code and message."""
        return {"problems": self.problems}


class OutOfMemory(EngineFault):
    """The device or the host could not hold the work; the ranks are restarted before the next job."""

    kind = "out_of_memory"

    def __init__(self, free_bytes: int | None, needed_bytes: int | None, message: str = "") -> None:
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes
        super().__init__(message or f"out of memory: {needed_bytes} bytes needed, {free_bytes} bytes free")

    def details(self) -> dict[str, Any]:
        """Return the two figures."""
        return {"free_bytes": self.free_bytes, "needed_bytes": self.needed_bytes}


class EngineError(EngineFault):
    """The engine failed on this request in a way that left it usable."""


class Stopped(EngineFault):
    """The run ended early because `should_stop` said so."""

    kind = "stopped"

    def __init__(self, message: str = "stopped at a step boundary") -> None:
        super().__init__(message)


class LoadRefusedError(Exception):
    """The engine cannot be loaded as it is set up; starting it again changes nothing until somebody acts."""


Report = Callable[[str, str, int, int], None]
"""`report(request_id, phase, step, total)`, called by the engine as it works."""

Outcome = RenderResult | EngineFault


class StopSignal(Protocol):
    """What an engine asks at its step boundaries; only the answers of rank 0 count."""

    def __call__(self) -> bool:
        """Tell whether all requests shall end at this boundary."""

    def dropped(self) -> frozenset[str]:
        """Return the requests of a wave whose slots are ghosts from this boundary on; it only grows."""


class Engine(Protocol):
    """One loaded engine of one rank; every rank of a group is sent the same calls in the same order."""

    def load(self, spec: LoadSpec, report: Report) -> None:
        """Block until the weights are in place and warm."""

    def fingerprint(self) -> dict[str, str]:
        """Name the revisions of code, checkpoint and libraries that shape the output."""

    def validate(self, request: RenderRequest) -> None:
        """Check on the host, without a device, what only a worker can know; raise `InvalidInput`."""

    def run(
        self, requests: Sequence[RenderRequest], report: Report, should_stop: StopSignal
    ) -> dict[str, Outcome]:
        """Render all requests and return one outcome per request id.

        `should_stop` is asked at step boundaries; only the answer of rank 0 counts, and the engine makes
        sure that all ranks leave at the same step.

        A data-parallel layout has as many slots as replicas and is given one to all of them filled. A slot
        without a request, or whose request was dropped or has failed, takes part in gather-only passes until
        the others have finished. Every rank is given all requests; the first rank of a replica
        (`output_rank`) answers for the request of its slot, and other answers for it are not looked at.
        """

    def close(self) -> None:
        """Free the devices."""


def num_slots_of(layout: Mapping[str, Any]) -> int:
    """Return how many requests a layout runs side by side."""
    return int(layout.get("data_parallel", 1))


def output_rank(slot: int, world: int, num_slots: int) -> int:
    """Return the rank that writes the file of a slot: the first of its replica, as ranks are numbered."""
    return slot * (world // num_slots)


def make_engine(name: str) -> Engine:
    """Import the named engine's module, and only that one, and build the engine.

    Raises:
        ValueError: No engine has this name.
        ImportError: The engine exists for tests only, or a package that it needs is missing.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}: choose one of {', '.join(sorted(ENGINES))}")
    return cast(Engine, importlib.import_module(ENGINES[name]).create())


def fault_of(data: Mapping[str, Any]) -> EngineFault:
    """Rebuild a typed error that crossed the pipe as `{"kind", "message", ...}`."""
    kind, message = data["kind"], str(data.get("message", ""))
    if kind == InvalidInput.kind:
        return InvalidInput(data.get("problems", []))
    if kind == OutOfMemory.kind:
        return OutOfMemory(data.get("free_bytes"), data.get("needed_bytes"), message)
    if kind == Stopped.kind:
        return Stopped(message)
    return EngineError(message)


def fault_to_json(fault: EngineFault) -> dict[str, Any]:
    """Turn a typed error into what crosses the pipe."""
    return {"kind": fault.kind, "message": str(fault), **fault.details()}
