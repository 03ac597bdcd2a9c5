"""The windows in which the video decoder works: what each call gets and which of its frames are kept.

The window is part of the decoder's definition, not a way to save memory: a whole-clip decode gives another
video. Windows share no state, so each one is a unit of work. Plain integers; no tensors and no torch.
"""

from dataclasses import dataclass

# Every latent frame becomes four frames, but for the first of a clip, which becomes one.
FRAMES_PER_LATENT = 4


@dataclass(frozen=True)
class Window:
    """One call of the decoder.

    Attributes:
        start, stop: The latent frames that it gets, of the padded clip (`padded_length`).
        is_first: Whether the call begins the clip; then its first latent frame becomes one frame only.
        keep_start, keep_stop: Which of the frames it makes are kept, the padding already left out.
    """

    start: int
    stop: int
    is_first: bool
    keep_start: int
    keep_stop: int

    @property
    def num_kept(self) -> int:
        """How many frames of the clip come from this window."""
        return self.keep_stop - self.keep_start


def padded_length(num_latents: int, first: int, step: int) -> int:
    """Return how many latent frames the windows cover; the last frame is repeated up to this length."""
    if num_latents <= first:
        return first
    return num_latents + (first - num_latents) % step


def num_frames(num_latents: int) -> int:
    """Return how many frames a clip of this many latent frames has."""
    return FRAMES_PER_LATENT * num_latents - (FRAMES_PER_LATENT - 1)


def plan_windows(num_latents: int, first: int, step: int) -> list[Window]:
    """Lay out the decoder's calls over a clip, in the order of their frames.

    Args:
        num_latents: Latent frames of the clip.
        first: Latent frames of the first window.
        step: Latent frames by which each later window moves on; neighbours see one of each other.

    Raises:
        ValueError: A number is not positive.
    Source: the reference, sliding-window decode of the TurboVAE. Differs: the padding at the end is cut off
        the kept ranges here instead of off the finished video.
    """
    if min(num_latents, first, step) < 1:
        raise ValueError(
            f"latents, first window and step must be positive, got {num_latents}, {first}, {step}"
        )
    padded = padded_length(num_latents, first, step)
    if padded == first:
        return [Window(0, first, is_first=True, keep_start=0, keep_stop=num_frames(num_latents))]
    windows = [Window(0, first + 1, is_first=True, keep_start=0, keep_stop=num_frames(first))]
    for start in range(first, padded, step):
        # One latent frame of context on both sides, none behind the end.
        stop = min(start + step + 1, padded)
        num_kept = FRAMES_PER_LATENT * (min(start + step, num_latents) - start)
        keep_start = FRAMES_PER_LATENT
        windows.append(
            Window(start - 1, stop, is_first=False, keep_start=keep_start, keep_stop=keep_start + num_kept)
        )
    return windows
