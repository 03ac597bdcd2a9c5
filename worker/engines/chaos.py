"""An engine that misbehaves on order, for the tests of everything around an engine; it needs MAGI2_TESTING=1.

A prompt of the form `chaos {"do": "sigkill", "at": 3, ...}` is a `Script`; any other prompt renders
well. It makes a real file after a scripted time per step. Its ranks agree on every step over loopback
sockets, as real ranks do by collectives: one that is dead or frozen holds up or breaks the others. In a wave
each replica obeys the script of its own slot (`rank` counts within the replica), and a slot without a job
keeps in step and computes nothing. Where the checkpoint root is a file, that file is a script for loading.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from magi2.config import engine_environment
from magi2.contract import NUM_FRAMES, GenerationRequest
from worker.engine_api import (
    Engine,
    EngineError,
    EngineFault,
    InvalidInput,
    LoadSpec,
    Outcome,
    OutOfMemory,
    RenderRequest,
    RenderResult,
    Report,
    Stopped,
    StopSignal,
    num_slots_of,
)
from worker.engines.rendezvous import Rendezvous
from worker.engines.stock_clip import stock_clip

PREFIX = "chaos "
STOP_ALL = 0x80  # of the byte that the ranks agree on; the other bits are slots that were called off

if not engine_environment().testing:
    raise ImportError("the chaos engine is for tests: set MAGI2_TESTING=1 to use it")


@dataclass(frozen=True)
class Script:
    """What to do wrong, where and when.

    Args:
        do: One of the methods of `Misdeeds`, or empty.
        at: After how many finished steps.
        rank: Which rank does it.
        epochs: In which attempts of the job; empty means in all.
        file: What the mp4 is like: good, wrong_size, wrong_frames, truncated or missing.
        ignore_stop: Never stop at a step boundary.
        step_s: How long a step takes.
        load_s: How long loading takes (scripts of the checkpoint root only).
    """

    do: str = ""
    at: int = 1
    rank: int = 0
    epochs: tuple[int, ...] = ()
    file: str = "good"
    ignore_stop: bool = False
    step_s: float = 0.01
    load_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Script":
        """Read a script, or take the default one if the text holds none."""
        if not text.startswith(PREFIX):
            return cls()
        members = json.loads(text.removeprefix(PREFIX))
        return cls(**{**members, "epochs": tuple(members.get("epochs", ()))})


class Misdeeds:
    """The ways in which a step can go wrong; the method names are the words of a script."""

    def exit(self) -> None:
        """Leave without a word, as a library that calls exit does."""
        os._exit(3)

    def sigkill(self) -> None:
        """Die as under the kernel's out-of-memory killer."""
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self) -> None:
        """Raise what no engine should raise."""
        raise RuntimeError("chaos: a defect of the engine")

    def freeze(self) -> None:
        """Hang as in a collective that never ends: other threads run on."""
        threading.Event().wait()

    def sigstop(self) -> None:
        """Stop the whole process; nothing of it runs on."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def hog_gil(self) -> None:
        """Sit in a C call that keeps the interpreter's lock, so that no other thread runs."""
        ctypes.PyDLL(None).sleep(3600)

    def start_child(self) -> None:
        """Leave a process behind that does not end by itself, and go on."""
        subprocess.Popen(["/bin/sleep", "3600"])

    def out_of_memory(self) -> None:
        """Find too little device memory."""
        raise OutOfMemory(free_bytes=1 << 30, needed_bytes=8 << 30)

    def engine_error(self) -> None:
        """Fail in a way that leaves the engine usable."""
        raise EngineError("chaos: the latents are not finite")


class ChaosEngine:
    """Renders the stock clip, unless the script says otherwise."""

    def __init__(self) -> None:
        self._spec = LoadSpec("", 0, 1, (), None, deterministic=False)
        self._rendezvous: Rendezvous | None = None

    def load(self, spec: LoadSpec, report: Report) -> None:
        """Meet the other ranks; obey the script that the checkpoint root may be."""
        self._spec = spec
        script = Script()
        if spec.ckpt_root and Path(spec.ckpt_root).is_file():
            script = Script.parse(Path(spec.ckpt_root).read_text())
        report("", "load", 0, 1)
        time.sleep(script.load_s)
        self._misbehave(script, "load.e1")
        self._rendezvous = Rendezvous(spec.rank, spec.world, spec.master_port)
        report("", "load", 1, 1)

    def fingerprint(self) -> dict[str, str]:
        """Name the engine; nothing else shapes its output."""
        return {"engine": "chaos", "python": sys.version.split()[0], "profile": self._spec.profile}

    def validate(self, request: RenderRequest) -> None:
        """Refuse what the script calls invalid."""
        if Script.parse(request.request["prompt"]).do == "invalid_input":
            message = "prompt is 7001 tokens; at most 7000 are supported"
            raise InvalidInput([{"field": "prompt", "code": "prompt_too_long", "message": message}])

    def run(
        self, requests: Sequence[RenderRequest], report: Report, should_stop: StopSignal
    ) -> dict[str, Outcome]:
        """Render the requests side by side where the layout has slots, else one after the other."""
        if num_slots_of(self._spec.layout) > 1:
            return self._render_wave(requests, report, should_stop)
        return {request.request_id: self._render(request, report, should_stop) for request in requests}

    def close(self) -> None:
        """Leave the other ranks."""
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _render_wave(
        self, requests: Sequence[RenderRequest], report: Report, should_stop: StopSignal
    ) -> dict[str, Outcome]:
        """Render the request of this rank's slot, or be a ghost; all ranks make the same number of steps."""
        spec = self._spec
        ranks_each = spec.world // num_slots_of(spec.layout)
        slots = {request.slot: request for request in requests}
        num_steps = GenerationRequest.from_json(dict(requests[0].request)).num_inference_steps
        mine = _Slot(slots.get(spec.rank // ranks_each), spec.rank % ranks_each)
        for step in range(num_steps + 1):
            mine.step(step, num_steps, report)
            called_off = sum(
                1 << slot for slot, each in slots.items() if each.request_id in should_stop.dropped()
            )
            agreed = self._agree(called_off | (STOP_ALL if should_stop() else 0))
            if agreed & STOP_ALL or agreed & (1 << (spec.rank // ranks_each)):
                mine.fault = mine.fault or Stopped()
            if agreed & STOP_ALL:
                break
        return mine.finish(report)

    def _render(
        self, request: RenderRequest, report: Report, should_stop: Callable[[], bool]
    ) -> RenderResult:
        wanted = GenerationRequest.from_json(dict(request.request))
        script = Script.parse(wanted.prompt)
        started = time.monotonic()
        report(request.request_id, "text_encode", 0, 1)
        if wanted.has_image != (request.image_path is not None and Path(request.image_path).is_file()):
            raise EngineError("chaos: the request and its image do not agree")
        self._denoise(request.request_id, wanted.num_inference_steps, script, report, should_stop)
        for phase in ("decode_audio", "decode_video", "mux"):
            report(request.request_id, phase, 0, 1)
        if self._spec.rank == 0:
            _write(script, wanted, Path(request.output_path))
        seconds = round(time.monotonic() - started, 3)
        return RenderResult(
            request.output_path,
            {"stage_durations": {"denoise": seconds}, "peak_memory_mb": None, "conditioning": {}},
        )

    def _denoise(
        self, request_id: str, num_steps: int, script: Script, report: Report, should_stop: Callable[[], bool]
    ) -> None:
        for step in range(num_steps + 1):
            report(request_id, "denoise", step, num_steps)
            if step == script.at:
                self._misbehave(script, request_id)
            if self._agree(int(should_stop() and not script.ignore_stop)):
                raise Stopped
            if step < num_steps:
                time.sleep(script.step_s)

    def _agree(self, wanted: int) -> int:
        if self._rendezvous is None:
            raise EngineError("run came before load")
        return self._rendezvous.agree(wanted)

    def _misbehave(self, script: Script, request_id: str) -> None:
        misbehave(script, request_id, self._spec.rank)


class _Slot:
    """One rank's share of a wave: a request until it fails or is called off, else a ghost."""

    def __init__(self, request: RenderRequest | None, rank_in_replica: int) -> None:
        self._request = request
        self._rank = rank_in_replica
        self._script = Script.parse(request.request["prompt"]) if request else Script()
        self.fault: EngineFault | None = None

    def step(self, step: int, num_steps: int, report: Report) -> None:
        """Compute one step, or nothing; what the engine types as a fault makes this slot a ghost."""
        if self._request is None or self.fault is not None:
            return
        report(self._request.request_id, "denoise", step, num_steps)
        try:
            if step == self._script.at:
                misbehave(self._script, self._request.request_id, self._rank)
        except EngineFault as fault:
            self.fault = fault
        if step < num_steps:
            time.sleep(self._script.step_s)

    def finish(self, report: Report) -> dict[str, Outcome]:
        """Write the file of this slot, if it has one and this rank writes it."""
        request = self._request
        if request is None:
            return {}
        if self.fault is not None:
            return {request.request_id: self.fault}
        report(request.request_id, "mux", 0, 1)
        if self._rank == 0:
            wanted = GenerationRequest.from_json(dict(request.request))
            _write(self._script, wanted, Path(request.output_path))
        stats = {"stage_durations": {}, "conditioning": {"slot": request.slot}}
        return {request.request_id: RenderResult(request.output_path, stats)}


def misbehave(script: Script, request_id: str, rank: int) -> None:
    """Do what the script says, if it means this rank and this attempt."""
    epoch = int(request_id.rpartition(".e")[2])
    if script.do and script.rank == rank and (not script.epochs or epoch in script.epochs):
        getattr(Misdeeds(), script.do)()


def _write(script: Script, wanted: GenerationRequest, path: Path) -> None:
    if script.file == "missing":
        return
    width = wanted.width + (16 if script.file == "wrong_size" else 0)
    num_frames = NUM_FRAMES - (1 if script.file == "wrong_frames" else 0)
    data = stock_clip(width, wanted.height, num_frames)
    path.write_bytes(data[: len(data) // 2] if script.file == "truncated" else data)


def create() -> Engine:
    """Return the engine for `make_engine`."""
    return ChaosEngine()
