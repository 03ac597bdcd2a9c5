"""The farm's own processes in embedded mode, and how one that ended by itself is started again.

A role is started by module name, never imported. One that crashes comes back after a pause that doubles with
each crash and is forgotten once it has run for a minute. Whether a role *works* is the supervisor's question.
"""

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.embedded.process import Child, ChildSpec

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0


@dataclass(frozen=True)
class Role:
    """A part of the farm that runs as `python -m MODULE ARGUMENTS`."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()


API = Role("api", "api")
TICKER = Role("ticker", "worker.ticker")


def worker_role(profile: str) -> Role:
    """Return the role of a worker that serves a profile."""
    return Role("worker", "worker", ("--profile", profile))


class RoleProcess:
    """A role that is kept running."""

    def __init__(self, role: Role, environment: Mapping[str, str], logs: Path, cwd: Path) -> None:
        """Start it; the caller's thread must outlive it."""
        self.name = role.name
        self._spec = ChildSpec(
            role.name,
            [sys.executable, "-m", role.module, *role.arguments],
            cwd,
            logs / f"{role.name}.log",
            environment,
        )
        self._pause_s = FIRST_PAUSE_S
        self._restart_at: float | None = None
        self._start()

    def _start(self) -> None:
        self.child = Child(self._spec)
        self._started_at = time.monotonic()
        self._restart_at = None

    def keep_running(self) -> str | None:
        """Start it again if it has ended and its pause is over; return a line if it just ended."""
        if self.child.returncode is None:
            return None
        now = time.monotonic()
        if self._restart_at is None:
            if now - self._started_at > STEADY_S:
                self._pause_s = FIRST_PAUSE_S
            self._restart_at = now + self._pause_s
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
            code = self.child.returncode
            return f"{self.name} ended with exit code {code}; starting it again in {pause_s:g} s ({self.log})"
        if now >= self._restart_at:
            self._start()
        return None

    @property
    def log(self) -> Path:
        """Where it writes what it prints."""
        return self._spec.log_path

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self.child.send(signal.SIGTERM)

    def end_by(self, deadline: float) -> None:
        """Wait until the deadline (monotonic), then kill it."""
        if not self.child.wait(deadline - time.monotonic()):
            self.child.kill()
