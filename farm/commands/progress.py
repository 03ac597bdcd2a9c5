"""Show a job's progress as lines: one for each phase and each denoising step, none twice.

A poll may miss a step that was short; its line is made up for when a later one is seen.
"""

from collections.abc import Callable
from typing import Any

# The part of a job that denoising takes, as the farm counts it.
_FIRST_PERCENT, _LAST_PERCENT = 5, 90
_AFTER_DENOISING = frozenset({"decode_video", "decode_audio", "mux"})


class ProgressLines:
    """Turns video objects, read one after the other, into lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Remember where lines go."""
        self._say = say
        self._attempt: int | None = None
        self._last = ""
        self._step = -1

    def show(self, video: dict[str, Any]) -> None:
        """Say what has changed since the last call."""
        if video.get("attempt") != self._attempt:
            self._attempt, self._step = video.get("attempt"), -1
        state, phase = video["state"], video.get("phase")
        if state == "running" and (phase == "denoise" or (phase in _AFTER_DENOISING and self._step >= 0)):
            self._show_steps(video)
        if state == "running" and phase == "denoise":
            return
        again = f" (attempt {self._attempt})" if self._attempt and self._attempt > 1 else ""
        doing = f"{state}: {phase}" if phase and state in ("starting", "running") else f"{state}{again}"
        if doing != self._last:
            self._last = doing
            self._say(f"{video.get('progress', 0):3d}%  {doing}")

    def _show_steps(self, video: dict[str, Any]) -> None:
        total = video["total_steps"]
        reached = video["step"] if video["phase"] == "denoise" else total
        for step in range(self._step + 1, reached + 1):
            percent = _FIRST_PERCENT + (_LAST_PERCENT - _FIRST_PERCENT) * step // total
            self._say(f"{percent:3d}%  denoise step {step}/{total}")
        self._step = max(self._step, reached)
