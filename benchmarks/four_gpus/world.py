"""What the stages of several ranks share: the world, what to predict, numbers of all ranks, peaks, times."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.four_gpus.rank import Place
from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.stages import PEAK
from magi2.config import ModelConfig
from magi2.contract import TIERS
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.packing import Conditioning
from magi2.parallel.groups import Group, Groups, joined
from magi2.parallel.layout import Layout
from magi2.parallel.memory import GIB, plan
from magi2.sampling.noise import Latents, draw_noise

# Tokens of the two branches' texts: of no equal length, and no multiple of a number of ranks.
TEXT_LENGTHS, TEXT_LENGTHS_TINY = (774, 451), (9, 4)
TIMESTEP = 700
# The calculator must not promise less than is used, nor much more.
PEAK_RANGE = (0.8, 1.05)


@contextmanager
def world_of(place: Place, layout: Layout) -> Iterator[Groups]:
    """Meet the other ranks, in the groups of a layout."""
    device = torch.device(place.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    with joined(layout, place.launch, device=device, timeout_s=place.limit_s) as groups:
        place.rows.say(f"{place.world} ranks have met")
        yield groups


def of_all(group: Group, number: float) -> list[float]:
    """Return a number of every rank; all must ask."""
    said: list[float] = group.stack(torch.tensor(number, dtype=torch.float64)).flatten().tolist()
    return said


def meet(groups: Groups, device: torch.device) -> float:
    """Let all ranks finish what they do, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    of_all(groups.world, 0.0)
    return time.monotonic()


@dataclass(frozen=True)
class Inputs:
    """What a replica predicts from."""

    noise: Latents
    conditioning: Conditioning

    def predict(self, model: Magi2Transformer) -> tuple[Tensor, Tensor]:
        """Predict both branches once."""
        return TransformerDenoiser(model, self.conditioning).predict(
            self.noise.video, self.noise.audio, TIMESTEP
        )


def inputs_of(place: Place, config: ModelConfig, tier: str, slot: int = 0) -> Inputs:
    """Draw noise and texts: equal on all ranks of a replica, different for every slot of a wave."""
    device = torch.device(place.device)
    generator = torch.Generator(device).manual_seed(100 + slot)
    lengths = TEXT_LENGTHS_TINY if place.is_tiny else TEXT_LENGTHS
    dtype = getattr(torch, config.params_dtype)
    positive, negative = (
        torch.randn(1, length, config.text_in_channels, generator=generator, device=device).to(dtype)
        for length in lengths
    )
    return Inputs(draw_noise(7 + slot, TIERS[tier], device), Conditioning((positive, negative)))


def num_differing(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> int:
    """Count values whose bits differ; fp32."""
    return sum(
        int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(got, want, strict=True)
    )


def relative_l2(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Return the norm of all differences over the norm of what is wanted."""
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(got, want, strict=True))
    return float((error / sum(float(b.double().square().sum()) for b in want)) ** 0.5)


def forget(device: torch.device) -> None:
    """Give the memory of what was dropped back, and measure peaks from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def add_peak(place: Place, groups: Groups, config: ModelConfig, tier: str) -> None:
    """Add the row that compares the peak of every rank with the calculator; a CPU has no such peak."""
    if place.device_type == "cpu":
        return
    needed = plan(config, groups.layout, tier=tier, staged_bytes=0)
    planned = needed.weights + needed.buffers + needed.activations
    peaks = of_all(groups.world, torch.cuda.max_memory_allocated() / GIB)
    reserved = of_all(groups.world, torch.cuda.max_memory_reserved() / GIB)
    free, there = torch.cuda.mem_get_info()
    held = of_all(groups.world, (there - free) / GIB)  # of NCCL, kernels and the driver too
    ratio = max(peaks) * GIB / planned
    low, high = PEAK_RANGE
    facts = {
        "peak_gib": [round(value, 2) for value in peaks],
        "reserved_gib": [round(value, 2) for value in reserved],
        "held_now_gib": [round(value, 2) for value in held],
        "planned_gib": round(planned / GIB, 2),
    }
    target = None if place.is_tiny else f"{low} to {high}"
    place.rows.add(Row(PEAK, ratio, "x", target, place.is_tiny or low <= ratio <= high, facts))


def slowest(groups: Groups, device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank for a piece of work that all begin together."""
    begin = meet(groups, device)
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(of_all(groups.world, time.monotonic() - begin))
