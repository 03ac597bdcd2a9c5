"""The books of one render: how far it is, how long its phases took, whether to stop, what the model saw.

Promises: every phase is reported from 0 to its total, in the order in which phases run; on CUDA a phase ends
when its work is done, not when it is enqueued. It decides nothing and touches no latents.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from magi2.errors import Stopped
from magi2.packing import Conditioning, Kind
from magi2.parallel.groups import ALONE, Group

# Told (phase, finished, total). Phases: load, text_encode, image_encode, denoise, decode_audio, decode_video;
# fetch_input and mux belong to whoever fetches and writes the files.
ProgressFn = Callable[[str, int, int], None]
_BRANCHES = ("conditional", "unconditional")
_COUNTED = (Kind.VIDEO, Kind.AUDIO, Kind.TEXT, Kind.SPECIAL, Kind.REFERENCE)


@dataclass(frozen=True)
class RenderStats:
    """What a render took, in seconds and MiB of device memory, and what the model was conditioned on.

    The peak is the largest of all ranks; with several, each one's stands beside it. `acceleration` says which
    steps were not computed in full, and is None where all were.
    """

    stage_durations: dict[str, float]
    peak_memory_mb: float | None
    conditioning: dict[str, Any]
    rank_peak_memory_mb: list[float] | None = None
    acceleration: dict[str, Any] | None = None


@dataclass
class RunRecord:
    """One render's record while it runs.

    Args:
        device: Whose work is timed and whose memory is watched; None is recorded for the CPU's.
        progress: Told how far each phase is.
        should_stop: Asked between steps.
    """

    device: torch.device
    progress: ProgressFn
    should_stop: Callable[[], bool]
    durations: dict[str, float] = field(default_factory=dict)
    conditioning: dict[str, Any] = field(default_factory=dict)
    acceleration: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def stage(self, phase: str, total: int) -> Iterator[Callable[[int], None]]:
        """Time a phase and report its begin, its steps (by the yielded function) and its end."""
        self.check()
        self.progress(phase, 0, total)
        begin, last = time.monotonic(), 0

        def done(finished: int) -> None:
            nonlocal last
            last = finished
            self.progress(phase, finished, total)

        yield done
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the time of the work, not of asking for it
        self.durations[phase] = time.monotonic() - begin
        if last != total:
            self.progress(phase, total, total)

    def check(self) -> None:
        """Raise `Stopped` if the render is to stop."""
        if self.should_stop():
            raise Stopped("stopped on request between two steps; nothing was kept")

    def note(self, conditioning: Conditioning, counts: Sequence[dict[str, int]]) -> None:
        """Keep what the model saw: the reference image's grid and the tokens of each branch."""
        grids = [list(reference.latent.shape[-2:]) for reference in conditioning.references]
        self.conditioning = {
            "reference_grid": grids[0] if grids else None,
            "branches": {
                branch: {kind.value: own.get(kind.value, 0) for kind in _COUNTED}
                for branch, own in zip(_BRANCHES, counts, strict=True)
            },
        }

    def stats(self, replica: Group = ALONE) -> RenderStats:
        """Return the record of a finished render; all ranks of the replica must ask."""
        if self.device.type != "cuda":
            return RenderStats(self.durations, None, self.conditioning, acceleration=self.acceleration)
        own = torch.tensor(torch.cuda.max_memory_allocated(self.device) / 2**20)
        peaks = replica.stack(own).tolist()
        each = peaks if len(peaks) > 1 else None
        return RenderStats(self.durations, max(peaks), self.conditioning, each, self.acceleration)


def silent(_phase: str, _finished: int, _total: int) -> None:
    """Report nothing."""
