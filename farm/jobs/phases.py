"""What an active job is doing, and the percentage that a user sees for it.

The percentage is a fixed share per phase: everything before the first step 0-4, denoising 5-90 linear in
finished steps, decoding and muxing 91-97, upload 98-99; 100 belongs to `succeeded` alone.
"""

from dataclasses import dataclass

PHASES = (
    "load",
    "fetch_input",
    "text_encode",
    "image_encode",
    "denoise",
    "decode_audio",
    "decode_video",
    "mux",
    "upload",
)
DENOISE = "denoise"
_AFTER_DENOISING = frozenset(PHASES[PHASES.index(DENOISE) + 1 :])
_SHARES = {
    "load": (0, 1),
    "fetch_input": (1, 2),
    "text_encode": (2, 3),
    "image_encode": (3, 4),
    "denoise": (5, 90),
    "decode_audio": (91, 92),
    "decode_video": (92, 96),
    "mux": (96, 97),
    "upload": (98, 99),
}


@dataclass(frozen=True)
class Progress:
    """The newest report of rank 0: the phase, and how many of its steps are finished."""

    phase: str
    step: int = 0
    total: int = 0

    @property
    def percent(self) -> int:
        """Return what the video object shows as `progress`; an unknown phase counts as the very beginning."""
        low, high = _SHARES.get(self.phase, (0, 0))
        if self.total <= 0:
            return low
        return low + (high - low) * min(max(self.step, 0), self.total) // self.total

    @property
    def denoised(self) -> int | None:
        """Return how many denoising steps are finished, in whatever phase it is; None means all."""
        if self.phase in _AFTER_DENOISING:
            return None
        return max(self.step, 0) if self.phase == DENOISE else 0
