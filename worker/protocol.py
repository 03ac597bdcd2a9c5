"""The messages between an agent and its ranks: one JSON object a line, over one inherited pipe each way.

Agent to rank: `load`, `validate`, `run`, `cancel` (of a run, or of some requests in it), `ping`, `exit`.
Rank to agent: `hello`, `progress`, `tick`, `ready`, `validated`, `dropped`, `result`, `done`, `pong`,
`crash`. A run is named by a token; whatever carries another token than that of the current run is stale and
is dropped. This module moves and checks bytes; it decides nothing.
"""

import fcntl
import json
import os
import select
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

LOAD, VALIDATE, RUN, CANCEL, PING, EXIT = "load", "validate", "run", "cancel", "ping", "exit"
HELLO, PROGRESS, TICK, READY = "hello", "progress", "tick", "ready"
VALIDATED, DROPPED = "validated", "dropped"
RESULT, DONE, PONG, CRASH = "result", "done", "pong", "crash"

IDLE_PHASE = "idle"  # what a tick says between jobs
TICK_S = 1.0
MAX_LINE_BYTES = 8 * 1024 * 1024
CRASH_EXIT_CODE = 70  # sysexits' EX_SOFTWARE: the rank said why before it left

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side sent something that is not a message, or takes none."""


def encode(kind: str, **members: Any) -> bytes:
    """Return one message as a line of UTF-8 JSON."""
    line = json.dumps({"type": kind, **members}, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return line.encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> Message:
    """Read one line back.

    Raises:
        ProtocolError: The line is no JSON object with a `type`.
    """
    try:
        message = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise ProtocolError(f"not a message: {line[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError(f"a message needs a type: {line[:80]!r}")
    return message


def read_messages(descriptor: int) -> Iterator[Message]:
    """Yield messages until the other side closes its end; a broken last line is dropped.

    Raises:
        ProtocolError: A line is no message, or is longer than any message may be.
    """
    pending = bytearray()
    while chunk := os.read(descriptor, 65536):
        pending += chunk
        *lines, rest = pending.split(b"\n")
        pending = bytearray(rest)
        if len(pending) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line longer than {MAX_LINE_BYTES} bytes")
        for line in lines:
            yield decode(bytes(line))


class Writer:
    """Writes whole messages to a pipe from any thread, and gives up on a reader that is stuck."""

    def __init__(self, descriptor: int, *, timeout_s: float | None) -> None:
        self._descriptor = descriptor
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)

    def send(self, kind: str, **members: Any) -> None:
        """Write one message.

        Raises:
            ProtocolError: The reader is gone, or has read nothing for the whole time-out.
        """
        data = memoryview(encode(kind, **members))
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        with self._lock:
            while data:
                self._wait_for_room(deadline)
                data = data[self._write_some(data) :]

    def _wait_for_room(self, deadline: float | None) -> None:
        if self._descriptor < 0:
            raise ProtocolError("the pipe is closed")
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        wait_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(wait_ms):
            raise ProtocolError(f"nothing was read from the pipe for {self._timeout_s:.0f} s")

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return 0  # less room than one atomic write needs: wait for more
        except OSError as error:
            raise ProtocolError(f"the reader is gone: {error.strerror}") from error

    def close(self) -> None:
        """Close this end; the reader sees the end of the stream."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def members_of(message: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    """Return the named members of a message.

    Raises:
        ProtocolError: One is missing.
    """
    missing = [name for name in names if name not in message]
    if missing:
        raise ProtocolError(f"message {message.get('type')!r} lacks {', '.join(missing)}")
    return tuple(message[name] for name in names)
