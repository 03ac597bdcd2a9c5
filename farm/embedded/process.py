"""Start and stop one child process: on a leash, in its own session, its output in a log file.

A child gets a parent-death signal, which follows the starting *thread*: only a thread that lives as long as
its process (the supervisor's main one) may start children. What a child prints goes to its log file, whose
end is part of the message when it fails. Nothing here knows which program it runs.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEASH = Path(__file__).with_name("leash.py")
LOG_LIMIT_BYTES = 8 * 1024 * 1024
POLL_S = 0.02


class EmbeddedError(RuntimeError):
    """A part of the embedded farm could not be found, started or reached; the message says what to change."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run: `user` is set only where a root process must run it as somebody else."""

    name: str
    command: Sequence[str]
    cwd: Path
    log_path: Path
    environment: Mapping[str, str]
    death_signal: signal.Signals = signal.SIGKILL
    user: str | None = None


class Child:
    """One running child process."""

    def __init__(self, spec: ChildSpec) -> None:
        """Start it; the caller's thread must outlive it."""
        self.spec = spec
        self._rotate_log()
        with spec.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                leashed(spec.command, death_signal=spec.death_signal, user=spec.user),
                cwd=spec.cwd,
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, which stays the same when the leash becomes the program."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it still runs."""
        if self.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and what is left in its process group."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; False if it still runs."""
        try:
            self._process.wait(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, number: signal.Signals, *, timeout_s: float) -> None:
        """Ask it to end with a signal, and kill it when that takes too long."""
        self.send(number)
        if not self.wait(timeout_s):
            self.kill()

    def wait_ready(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll until the child answers.

        Raises:
            EmbeddedError: It ended or did not answer in time; the message has the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self.returncode is not None:
                raise EmbeddedError(
                    f"{self.spec.name} ended with exit code {self.returncode}. {self._log_end()}"
                )
            if time.monotonic() > deadline:
                self.kill()
                raise EmbeddedError(
                    f"{self.spec.name} did not answer in {timeout_s:.0f} s. {self._log_end()}"
                )
            time.sleep(POLL_S)

    def _rotate_log(self) -> None:
        path = self.spec.log_path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
            path.replace(path.with_name(path.name + ".1"))

    def _log_end(self) -> str:
        return f"The end of {self.spec.log_path}:\n{log_tail(self.spec.log_path)}"


def leashed(
    command: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL, user: str | None = None
) -> list[str]:
    """Return the command line that runs a command on a leash held by the calling thread."""
    return [
        sys.executable,
        "-I",
        "-S",
        str(LEASH),
        str(int(death_signal)),
        str(os.getpid()),
        user or "-",
        *command,
    ]


def log_tail(path: Path, *, num_lines: int = 15) -> str:
    """Return the last lines of a log file."""
    if not path.exists():
        return "(no output)"
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 8192))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-num_lines:])
