"""One rank as its agent sees it: a child process, two pipes, a log file and the last lines of its output.

Starting is a plain exec, and the rank arms a parent-death signal that follows the starting *thread*:
only the group's supervisor thread may build one. The threads here read; what a message means is the
group's business.
"""

import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from worker import protocol
from worker.protocol import Message, ProtocolError, Writer

TAIL_LINES, TAIL_CHARS = 200, 500
LOG_BYTES = 5 * 1024 * 1024
LINE_BYTES = 64 * 1024
SEND_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RankSpec:
    """How to start one rank."""

    rank: int
    environment: Mapping[str, str]
    log_path: Path


class RankProcess:
    """A running rank; `on_message(rank, message)` is called by its reader thread, with None at the end."""

    def __init__(self, spec: RankSpec, on_message: Callable[[int, Message | None], None]) -> None:
        """Start it; the caller's thread must live as long as the agent."""
        self.spec = spec
        self._on_message = on_message
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        control_read, control_write = os.pipe()
        event_read, event_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command(control_read, event_write),
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(control_read, event_write),
                process_group=0,
            )
        except OSError:
            os.close(control_write)
            os.close(event_read)
            raise
        finally:
            os.close(control_read)
            os.close(event_write)
        self._writer = Writer(control_write, timeout_s=SEND_TIMEOUT_S)
        self._threads = [
            threading.Thread(target=self._read_events, args=(event_read,), name=f"rank{spec.rank}-events"),
            threading.Thread(
                target=self._read_output, args=(self._process.stdout,), name=f"rank{spec.rank}-log"
            ),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def _command(self, control_fd: int, event_fd: int) -> list[str]:
        options = {
            "--rank": self.spec.rank,
            "--control-fd": control_fd,
            "--event-fd": event_fd,
            "--parent": os.getpid(),
        }
        words = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, "-m", "worker.rank", *words]

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs.

        The process is looked at and not reaped: until `reap` its id, and that of its group, stay its own.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send(self, kind: str, **members: Any) -> None:
        """Send one message.

        Raises:
            ProtocolError: The rank is gone or does not read.
        """
        self._writer.send(kind, **members)

    def tail(self) -> list[str]:
        """Return the last lines of what it printed."""
        return list(self._tail)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it started, unless it was reaped."""
        if self._process.returncode is None:
            os.killpg(self.pid, number)

    def reap(self, timeout_s: float) -> bool:
        """Collect the ended process and what is left of its group; False if something lives on."""
        self.signal(signal.SIGKILL)
        try:
            self._process.wait(timeout=timeout_s)
            is_gone = self._is_group_gone(timeout_s)
        except subprocess.TimeoutExpired:
            is_gone = False
        self._writer.close()
        for thread in self._threads:
            thread.join(timeout=1.0)
        return is_gone

    def _is_group_gone(self, timeout_s: float) -> bool:
        """Wait until no process of the group is left; init reaps those that are not our own children."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        return False

    def _read_events(self, descriptor: int) -> None:
        try:
            for message in protocol.read_messages(descriptor):
                self._on_message(self.spec.rank, message)
        except ProtocolError as error:
            self._on_message(
                self.spec.rank, {"type": protocol.CRASH, "message": f"{error}", "phase": "protocol"}
            )
        finally:
            os.close(descriptor)
            self._on_message(self.spec.rank, None)

    def _read_output(self, stream: IO[bytes]) -> None:
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.handlers.RotatingFileHandler(
            self.spec.log_path, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8", delay=True
        )
        with stream:
            for raw in iter(lambda: stream.readline(LINE_BYTES), b""):
                line = raw.decode("utf-8", "replace").rstrip("\n")
                self._tail.append(line[:TAIL_CHARS])
                file.emit(logging.makeLogRecord({"msg": line, "args": None}))
        file.close()
