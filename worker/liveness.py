"""When a rank counts as alive: its last sign of progress must be younger than the limit of its phase.

A sign of progress is a change of the count that only the rank's main thread moves; a tick without one is
none. Times are the agent's monotonic clock. This module decides nothing about leases: the heartbeat asks it.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

from worker.protocol import IDLE_PHASE, Message

STEPS_REMEMBERED = 64


@dataclass(frozen=True)
class StallLimits:
    """Seconds without progress that are still believed, by phase."""

    load_s: float = 30 * 60
    cpu_text_encode_s: float = 30 * 60
    first_step_s: float = 600
    step_s: float = 60
    steps: float = 10
    other_s: float = 180

    def limit_s(self, phase: str, step: int, median_step_s: float, *, on_cpu: bool) -> float:
        """Return the limit for a rank that is in this phase and has finished `step` steps."""
        if phase == "load":
            return self.load_s
        if phase == "text_encode" and on_cpu:
            return self.cpu_text_encode_s
        if phase == "denoise":
            return self.first_step_s if step == 0 else max(self.step_s, self.steps * median_step_s)
        return self.other_s


@dataclass
class RankWatch:
    """What the agent has seen of one rank."""

    progress_at: float
    marks: int = -1
    phase: str = IDLE_PHASE
    step: int = 0
    _step_at: float | None = None
    _step_durations: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))

    def saw_tick(self, message: Message, now: float) -> None:
        """Take in a tick; only a moved count or another place counts as progress."""
        seen = (int(message["marks"]), str(message["phase"]), int(message["step"]))
        if seen != (self.marks, self.phase, self.step):
            self.marks = seen[0]
            self.saw_work(seen[1], seen[2], now)

    def saw_work(self, phase: str, step: int, now: float) -> None:
        """Take in a report of the main thread, and time the steps between reports."""
        if phase != "denoise":
            self._step_at = None
        elif step != self.step or self.phase != "denoise":
            if self._step_at is not None and step > self.step:
                self._step_durations.append((now - self._step_at) / (step - self.step))
            self._step_at = now
        self.phase, self.step, self.progress_at = phase, step, now

    def begin_run(self, now: float) -> None:
        """Forget the last run: the first step of an attempt has a limit of its own."""
        self.phase, self.step, self.progress_at, self._step_at = IDLE_PHASE, 0, now, None

    @property
    def median_step_s(self) -> float:
        """Median of the last steps' durations, 0 before the first."""
        return statistics.median(self._step_durations) if self._step_durations else 0.0

    def stall(self, limits: StallLimits, now: float, *, on_cpu: bool) -> str | None:
        """Say how long the rank has made no progress, if that is longer than its phase allows."""
        limit_s = limits.limit_s(self.phase, self.step, self.median_step_s, on_cpu=on_cpu)
        age_s = now - self.progress_at
        if age_s <= limit_s:
            return None
        return f"no progress for {age_s:.1f} s in {self.phase} after step {self.step} (limit {limit_s:.1f} s)"
