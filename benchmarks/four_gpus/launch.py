"""Processes of one stage: started together, watched, and gone afterwards, whatever happened.

Promises: each process is the first of a process group of its own and ends with the process that started it;
after the time-out, or soon after one of them failed, all are killed with all that they started. NVLink
multicast is off in everything that is started here: a program that dies while it uses it can take the GPUs
of its whole host out of service. Torch-free.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farm.embedded.process import leashed

ROOT = Path(__file__).resolve().parents[2]
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
POLL_S = 0.05
# Others may fail because one did: what they say is evidence too.
GRACE_S = 5.0
TAIL_LINES = 40


def environment(*, on_cpu: bool, scratch: Path | None = None) -> dict[str, str]:
    """Return the environment of everything that is started: this process's own, and what must be set.

    Args:
        on_cpu: Ranks share the cores.
        scratch: For temporary files, so that those of a killed process go too.
    """
    own = dict(os.environ)  # noqa: TID251 - handed through, not read
    given = {"OMP_NUM_THREADS": "1" if on_cpu else "8", "PYTHONPATH": str(ROOT)}
    return own | MULTICAST_OFF | given | ({} if scratch is None else {"TMPDIR": str(scratch)})


@dataclass
class Started:
    """Running processes and their logs."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, negative for signals; None for what still runs.

        Nothing is reaped here: until `kill` a process id, and that of its group, stay its own.
        """
        return [_code(process) for process in self.processes]

    def kill(self) -> None:
        """Kill every process with all that it started, and reap them."""
        for process in self.processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def tails(self) -> dict[str, list[str]]:
        """Return the last lines of every log."""
        return {path.stem: _tail(path) for path in self.logs}


def start(commands: Sequence[Sequence[str]], environ: Mapping[str, str], folder: Path) -> Started:
    """Start processes; what the first one prints is shown too, the others write to their logs.

    Args:
        commands: One for each, without the interpreter.
        environ: Of all.
        folder: Of the logs.
    """
    started = Started()
    for number, command in enumerate(commands):
        path = folder / f"process{number}.log"
        with path.open("wb") as log:
            started.processes.append(
                subprocess.Popen(
                    leashed([sys.executable, *command]),
                    cwd=ROOT,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=None if number == 0 else log,  # its progress is this process's own
                    stderr=log,
                    start_new_session=True,
                )
            )
        started.logs.append(path)
    return started


@dataclass(frozen=True)
class End:
    """How the processes of a stage ended; `why` is empty where all went well."""

    codes: tuple[int | None, ...]
    why: str
    seconds: float


def wait(started: Started, limit_s: float) -> End:
    """Wait until all have ended, or until there is nothing left to wait for; nothing is left running.

    Args:
        started: Killed on the way out.
        limit_s: From now on.
    """
    begin = time.monotonic()
    deadline, failed, late = begin + limit_s, "", f"not finished within {limit_s:.0f} s"
    try:
        while None in (codes := started.codes) and time.monotonic() < deadline:
            if not failed and (failed := _first_failure(started, codes)):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(POLL_S)
    finally:
        codes = started.codes
        started.kill()
    seconds = time.monotonic() - begin
    failed = failed or _first_failure(started, codes)
    return End(tuple(codes), failed or (late if None in codes else ""), seconds)


def _first_failure(started: Started, codes: Sequence[int | None]) -> str:
    for number, code in enumerate(codes):
        if code:
            last = [line for line in _tail(started.logs[number]) if line.strip()][-1:]
            return ": ".join([f"process {number} ended with {code}", *last])
    return ""


def _code(process: subprocess.Popen[bytes]) -> int | None:
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _tail(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
