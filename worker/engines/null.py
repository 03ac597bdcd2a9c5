"""An engine that hands out a ready file at once, to measure all but an engine; needs MAGI2_TESTING=1."""

from collections.abc import Sequence
from pathlib import Path

from magi2.config import engine_environment
from magi2.contract import GenerationRequest
from worker.engine_api import (
    Engine,
    LoadSpec,
    Outcome,
    RenderRequest,
    RenderResult,
    Report,
    StopSignal,
    num_slots_of,
    output_rank,
)
from worker.engines.stock_clip import stock_clip

if not engine_environment().testing:
    raise ImportError("the null engine is for tests: set MAGI2_TESTING=1 to use it")


class NullEngine:
    """Copies the stock clip."""

    def load(self, spec: LoadSpec, report: Report) -> None:
        """Have nothing to load."""
        self._spec = spec
        report("", "load", 1, 1)

    def fingerprint(self) -> dict[str, str]:
        """Name the engine."""
        return {"engine": "null"}

    def validate(self, request: RenderRequest) -> None:
        """Refuse only what is no request at all."""
        GenerationRequest.from_json(dict(request.request))

    def run(
        self, requests: Sequence[RenderRequest], report: Report, should_stop: StopSignal
    ) -> dict[str, Outcome]:
        """Write every file that is this rank's to write."""
        should_stop()
        outcomes: dict[str, Outcome] = {}
        for request in requests:
            wanted = GenerationRequest.from_json(dict(request.request))
            report(request.request_id, "mux", 0, 1)
            world, num_slots = self._spec.world, num_slots_of(self._spec.layout)
            if self._spec.rank == output_rank(request.slot, world, num_slots):
                Path(request.output_path).write_bytes(stock_clip(wanted.width, wanted.height))
            outcomes[request.request_id] = RenderResult(request.output_path, {"stage_durations": {}})
        return outcomes

    def close(self) -> None:
        """Have nothing to free."""


def create() -> Engine:
    """Return the engine for `make_engine`."""
    return NullEngine()
