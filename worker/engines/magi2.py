"""The real engine in a rank: loads one `Magi2Pipeline`, renders, writes the mp4.

The only module of the service that imports torch and the engine, and only when it loads: first it refuses,
by name, what it could not run with. The engine's typed errors become those of the protocol; anything else, a
lost peer too, is left to be a crash. One device per process; the ranks of a group make the same calls, and
the first rank of each replica writes its file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi2 import errors
from magi2.config import (
    CACHE_NUMBERS,
    DTYPES,
    CacheConfig,
    EngineConfig,
    Launch,
    engine_environment,
    wait_passively,
)
from magi2.contract import GenerationRequest
from magi2.parallel.layout import Layout, check, coordinates
from worker.engine_api import (
    Engine,
    EngineError,
    EngineFault,
    InvalidInput,
    LoadRefusedError,
    LoadSpec,
    Outcome,
    OutOfMemory,
    RenderRequest,
    RenderResult,
    Report,
    Stopped,
    StopSignal,
)

if TYPE_CHECKING:
    from magi2.media.writer import ClipWriter
    from magi2.pipeline import Magi2Pipeline, Rendered

logger = logging.getLogger(__name__)
# Members of a profile that come beside those of the layout.
_OTHERS = {"dtype", "crf", *(f"cache_{name}" for name in CACHE_NUMBERS)}


class Magi2Engine:
    """The pipeline of this process, and the files around it."""

    def __init__(self) -> None:
        self._pipeline: Magi2Pipeline | None = None
        self._groups = ExitStack()

    def load(self, spec: LoadSpec, report: Report) -> None:
        """Load all weights.

        Raises:
            LoadRefusedError: Layout, checkpoint or an installed package cannot work; it says what to change.
        """
        refuse_hf_kernels()
        try:
            layout = layout_of(spec)
            config = _engine_config(spec)
            wait_passively()
            # Imported here: they bring torch, and must come after the refusals.
            import torch

            from magi2.checkpoint.index import read_model_config  # as above
            from magi2.parallel.groups import joined  # as above
            from magi2.pipeline import Magi2Pipeline  # as above

            check(layout, read_model_config(config.checkpoint), launched=spec.world)
            launch = Launch(spec.rank, spec.world, port=spec.master_port)
            groups = self._groups.enter_context(joined(layout, launch, device=torch.device(config.device)))
            self._pipeline = Magi2Pipeline(
                config, progress=lambda phase, step, total: report("", phase, step, total), groups=groups
            )
        except (errors.LayoutError, errors.CheckpointError) as error:
            raise LoadRefusedError(str(error)) from error

    def fingerprint(self) -> dict[str, str]:
        """Name what made a clip."""
        return self._loaded().fingerprint()

    def validate(self, request: RenderRequest) -> None:
        """Check the request again, its image's pixels and its prompt's tokens.

        Raises:
            InvalidInput: Every broken rule.
        """
        try:
            wanted, image = _read(request)
            self._loaded().validate(wanted, image)
        except errors.InvalidInput as error:
            raise _fault_of(error) from error

    def run(
        self, requests: Sequence[RenderRequest], report: Report, should_stop: StopSignal
    ) -> dict[str, Outcome]:
        """Render a wave side by side, or requests one after the other; a stop ends all that are left."""
        if self._loaded().groups.layout.data_parallel > 1:
            return self._run_wave(requests, report, should_stop)
        return {request.request_id: self._render(request, report, should_stop) for request in requests}

    def close(self) -> None:
        """Let go of the weights."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._groups.close()

    def _render(self, request: RenderRequest, report: Report, should_stop: Callable[[], bool]) -> Outcome:
        def progress(phase: str, step: int, total: int) -> None:
            report(request.request_id, phase, step, total)

        pipeline = self._loaded()
        try:
            wanted, image = _read(request)
            with self._writer(request) as writer:
                rendered = pipeline(
                    wanted, image=image, progress=progress, should_stop=should_stop, writer=writer
                )
                return self._finish(request, rendered, writer, report)
        except errors.EngineFailure as error:
            return _fault_of(error)

    def _run_wave(
        self, requests: Sequence[RenderRequest], report: Report, should_stop: StopSignal
    ) -> dict[str, Outcome]:
        """Render the request of this rank's slot; the others' outcomes are told by their own ranks."""
        # Imported here: it brings torch, which only a loaded engine may.
        from magi2.wave import Member, render_wave

        groups = self._loaded().groups
        by_slot = {request.slot: request for request in requests}
        slots = [by_slot.get(slot) for slot in range(groups.layout.data_parallel)]
        own = slots[coordinates(groups.layout, groups.rank).dp]

        def progress(phase: str, step: int, total: int) -> None:
            report("" if own is None else own.request_id, phase, step, total)

        outcomes: dict[str, Outcome] = {r.request_id: RenderResult(r.output_path) for r in requests}
        try:
            members = [None if request is None else Member(*_read(request)) for request in slots]
            with nullcontext() if own is None else self._writer(own) as writer:
                rendered = render_wave(
                    self._loaded(),
                    members,
                    progress=progress,
                    signal=_BySlot(should_stop, by_slot),
                    writer=writer,
                )
                if isinstance(rendered, errors.EngineFailure):
                    raise rendered
                if own is not None and writer is not None:
                    outcomes[own.request_id] = self._finish(own, rendered, writer, report)
        except errors.EngineFailure as error:
            fault = _fault_of(error)
            outcomes |= {r.request_id: fault for r in (requests if own is None else [own])}
        return outcomes

    def _writer(self, request: RenderRequest) -> ClipWriter:
        """Return what encodes the request's clip while it is decoded."""
        # Imported here: it brings torch, which only a loaded engine may.
        from magi2.media.writer import ClipWriter

        return ClipWriter(Path(request.output_path), crf=self._loaded().config.crf)

    def _finish(
        self, request: RenderRequest, rendered: Rendered | None, writer: ClipWriter, report: Report
    ) -> RenderResult:
        """Finish the file; where the clip is another rank's there is none to write."""
        if rendered is None:
            return RenderResult(request.output_path)
        report(request.request_id, "mux", 0, 1)
        began = time.monotonic()
        writer.finish()
        report(request.request_id, "mux", 1, 1)
        stats = asdict(rendered.stats)
        stats["stage_durations"]["mux"] = time.monotonic() - began
        return RenderResult(request.output_path, _rounded(stats))

    def _loaded(self) -> Magi2Pipeline:
        if self._pipeline is None:
            raise EngineError("the engine is not loaded")
        return self._pipeline


class _BySlot:
    """A stop signal that speaks of slots instead of requests."""

    def __init__(self, signal: StopSignal, requests: Mapping[int, RenderRequest]) -> None:
        self._signal = signal
        self._requests = requests

    def __call__(self) -> bool:
        """Tell whether all requests shall end."""
        return self._signal()

    def dropped(self) -> frozenset[int]:
        """Return the slots whose requests were dropped."""
        names = self._signal.dropped()
        return frozenset(slot for slot, request in self._requests.items() if request.request_id in names)


def refuse_hf_kernels() -> None:
    """Refuse to run beside Hugging Face's `kernels`, which hides this project's package of the same name.

    Raises:
        LoadRefusedError: It is installed.
    """
    try:
        found = version("kernels")
    except PackageNotFoundError:
        return
    raise LoadRefusedError(
        f"the package `kernels` {found} (Hugging Face) is installed and collides with this project's own "
        "package of that name: run `pip uninstall kernels`"
    )


def layout_of(spec: LoadSpec) -> Layout:
    """Return the profile's layout, and warn of one that nobody has qualified.

    Raises:
        LayoutError: It breaks a rule, or needs what this release has not; profile and flags are named.
    """
    try:
        layout = Layout.from_flags(
            {flag: value for flag, value in spec.layout.items() if flag not in _OTHERS}
        )
    except errors.LayoutError as error:
        raise errors.LayoutError(f"profile {spec.profile}: {error}") from error
    if layout.warning and spec.rank == 0:
        logger.warning("layout_unqualified profile=%s ranks=%d", spec.profile, layout.world)
    return layout


def _engine_config(spec: LoadSpec) -> EngineConfig:
    if not spec.ckpt_root:
        raise LoadRefusedError(
            "no checkpoint folder: set MAGI2_CKPT_ROOT to the folder that holds the weights"
        )
    # The rank sees exactly one device, whatever its number on the host.
    device = "cuda:0" if spec.devices else "cpu"
    try:
        cache = CacheConfig.from_row(spec.layout)
    except ValueError as error:
        raise LoadRefusedError(f"profile {spec.profile}: {error}") from error
    return EngineConfig(
        Path(spec.ckpt_root).expanduser(),
        device=device,
        dtype=spec.layout.get("dtype", DTYPES[0]),
        crf=spec.layout.get("crf", EngineConfig.crf),
        deterministic=spec.deterministic,
        cache=cache,
        flash_attn_version=engine_environment().flash_attn_version,
    )


def _read(request: RenderRequest) -> tuple[GenerationRequest, bytes | None]:
    image = Path(request.image_path).read_bytes() if request.image_path else None
    return GenerationRequest.from_json(dict(request.request)), image


def _fault_of(error: errors.EngineFailure) -> EngineFault:
    """Return the protocol's error for one of the engine's.

    Raises:
        EngineFailure: It has none: the same error, to be a crash.
    """
    if isinstance(error, errors.InvalidInput):
        nameless = [{"field": "request", "code": "invalid_field", "message": str(error)}]
        return InvalidInput([asdict(problem) for problem in error.problems] or nameless)
    if isinstance(error, errors.OutOfMemory):
        return OutOfMemory(error.free_bytes, error.needed_bytes, str(error))
    if isinstance(error, errors.Stopped):
        return Stopped(str(error))
    if isinstance(error, errors.EngineError):
        return EngineError(str(error))
    raise error


def _rounded(value: Any) -> Any:
    """Return figures with three decimals: seconds and MiB, for people and for JSON."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def create() -> Engine:
    """Return the engine for `make_engine`."""
    return Magi2Engine()
