"""Three steps at 540p: how long they take, what they hold, and what streaming leaves exposed."""

import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from benchmarks.four_gpus.layouts import model_of
from benchmarks.four_gpus.rank import Place
from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.stages import EXPOSED, SPEED, SPEED_DLO
from benchmarks.four_gpus.world import add_peak, forget, inputs_of, meet, of_all, world_of
from magi2 import determinism
from magi2.config import SamplingConfig
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.offload.runtime import CudaRuntime, Stream
from magi2.parallel.groups import Groups
from magi2.sampling.loop import denoise

TIER = "540p"
NUM_STEPS = 3
# The published best of another engine is 2.87 s.
MOST_S = 2.2
MOST_EXPOSED = 0.05
NUM_DISTINCT = 6


def run_speed(place: Place) -> None:
    """Time the stage's layout."""
    determinism.configure(deterministic=False)
    device = torch.device(place.device)
    with torch.no_grad(), world_of(place, place.layout) as groups:
        inputs = inputs_of(place, place.model, TIER)
        with model_of(place, groups, place.model, NUM_DISTINCT) as model:
            place.rows.say("all layers are in place")
            forget(device)
            inputs.predict(model)  # compiles, and fills the ring
            place.rows.say("warm")
            meter = attach_meter(place, model)
            steps = timed_steps(place, groups, model, inputs)
            add_rows(place, groups, steps, meter)
            add_peak(place, groups, place.model, TIER)


class EventMeter:
    """What a ring's pieces cost, by CUDA events; a CPU has none."""

    def __init__(self, runtime: object) -> None:
        self._runtime = runtime if isinstance(runtime, CudaRuntime) else None
        self._copies: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    def event(self, stream: Stream) -> Any:
        """Return an event with a time."""
        if self._runtime is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._runtime.queue(stream))
        return event

    def copied(self, _number: int, begin: Any, end: Any) -> None:
        """Take the copy of a piece."""
        self._copies.append((begin, end))

    def waited(self, _number: int, begin: Any, end: Any) -> None:
        """Take the time that computing stood still for a piece."""
        self._waits.append((begin, end))

    @property
    def copying_s(self) -> float:
        """Seconds of all copies."""
        return _seconds(self._copies)

    @property
    def waiting_s(self) -> float:
        """Seconds of all waits."""
        return _seconds(self._waits)


def _seconds(spans: list[tuple[Any, Any]]) -> float:
    return sum(begin.elapsed_time(end) for begin, end in spans if begin is not None) / 1e3


def attach_meter(place: Place, model: Magi2Transformer) -> EventMeter | None:
    """Measure the ring of a streamed model."""
    streamer = model.streamer
    if streamer is None or streamer.ring is None:
        return None
    streamer.ring.meter = meter = EventMeter(streamer.runtime)
    place.rows.say(f"slots of {streamer.ring.nbytes / 2**30:.2f} GiB")
    return meter


def timed_steps(place: Place, groups: Groups, model: Magi2Transformer, inputs: Any) -> list[float]:
    """Return the seconds of each step, of the slowest rank, guidance and solver included."""
    device = torch.device(place.device)
    ends = [meet(groups, device)]

    def on_step(_step: int, _total: int) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.monotonic())

    denoiser = TransformerDenoiser(model, inputs.conditioning)
    denoise(
        denoiser,
        inputs.noise.video,
        inputs.noise.audio,
        num_steps=NUM_STEPS,
        sampling=SamplingConfig(),
        on_step=on_step,
    )
    own = [after - before for before, after in pairwise(ends)]
    return [max(of_all(groups.world, seconds)) for seconds in own]


def add_rows(place: Place, groups: Groups, steps: list[float], meter: EventMeter | None) -> None:
    """Judge the steps, and what waited for transfers."""
    typical = statistics.median(steps)
    facts: dict[str, Any] = {"steps_s": [round(step, 4) for step in steps]}
    if meter is None:
        target = None if place.is_tiny else f"<= {MOST_S} s"
        place.rows.add(Row(SPEED, typical, "s", target, place.is_tiny or typical <= MOST_S, facts))
        return
    place.rows.add(Row(SPEED_DLO, typical, "s", facts=facts))
    if place.device_type == "cpu":  # which knows no times of events
        return
    waited = of_all(groups.world, meter.waiting_s)
    copying = of_all(groups.world, meter.copying_s)
    share = max(waited) / sum(steps)
    facts = {
        "waited_s": [round(value, 4) for value in waited],
        "copying_s": [round(value, 4) for value in copying],
    }
    target = None if place.is_tiny else f"<= {MOST_EXPOSED:g}"
    place.rows.add(Row(EXPOSED, share, "", target, place.is_tiny or share <= MOST_EXPOSED, facts))
