"""Show a job's progress as lines: one for each phase and each denoising step, none twice."""

from collections.abc import Callable
from typing import Any


class ProgressLines:
    """Turns video objects, read one after the other, into lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Remember where lines go."""
        self._say = say
        self._last: tuple[Any, ...] = ()

    def show(self, video: dict[str, Any]) -> None:
        """Say what has changed since the last call."""
        state, phase, step = video["state"], video.get("phase"), video.get("step")
        attempt = video.get("attempt")
        now = (attempt, state, phase, step)
        if now == self._last:
            return
        self._last = now
        at = f"{video.get('progress', 0):3d}%"
        if state == "running" and phase == "denoise":
            self._say(f"{at}  denoise step {step}/{video.get('total_steps')}")
        elif phase and state in ("starting", "running"):
            self._say(f"{at}  {state}: {phase}")
        else:
            again = f" (attempt {attempt})" if attempt and attempt > 1 else ""
            self._say(f"{at}  {state}{again}")
