"""How often, and after which pauses, the ranks of a group are started again; numbers of the failure policy.

Pauses grow with each failure since the last finished run. A failure that would need one restart more than the
window allows makes the group sick: it claims nothing until an operator restarts its ranks or its agent.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from farm.clock import monotonic_s


@dataclass
class RestartPolicy:
    """The pauses, the window, and what has happened in it."""

    pauses_s: tuple[float, ...] = (5.0, 15.0, 60.0, 300.0)
    max_restarts: int = 3
    window_s: float = 15 * 60.0
    clock: Callable[[], float] = monotonic_s
    is_sick: bool = False
    num_restarts: int = 0  # of the agent's whole life
    _failures: int = 0
    _restarts: deque[float] = field(default_factory=deque)

    def failed(self) -> float | None:
        """Count a failure and return the pause before the next start; None when the group is sick."""
        now = self.clock()
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        if self.is_sick or len(self._restarts) >= self.max_restarts:
            self.is_sick = True
            return None
        self._restarts.append(now)
        self.num_restarts += 1
        self._failures += 1
        return self.pauses_s[min(self._failures, len(self.pauses_s)) - 1]

    def finished_run(self) -> None:
        """Forget the growth of the pauses: the ranks have shown that they work."""
        self._failures = 0

    def recover(self) -> None:
        """Begin anew: an operator has looked at the group."""
        self.is_sick = False
        self._failures = 0
        self._restarts.clear()
