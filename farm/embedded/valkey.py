"""The embedded broker: Valkey (or Redis) on a loopback port with an append-only file and `noeviction`.

What it holds may be lost at any second without harm: PostgreSQL is the truth. So it is simply killed when its
starter dies.
"""

import contextlib
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from farm.embedded.binaries import VALKEY, find_program
from farm.embedded.ports import LOOPBACK, free_ports
from farm.embedded.process import Child, ChildSpec

READY_TIMEOUT_S = 20.0


class ValkeyServer:
    """A running Valkey."""

    def __init__(self, directory: Path, environment: Mapping[str, str], *, port: int | None = None) -> None:
        """Start it with its data in a folder; it answers after `wait_ready`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_ports(1)[0]
        # fmt: off
        command = [
            str(find_program(VALKEY, environment)), "--port", str(self.port), "--bind", LOOPBACK,
            "--dir", str(directory), "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction",
        ]
        # fmt: on
        self.child = Child(ChildSpec("valkey", command, directory, directory / "valkey.log", environment))

    def wait_ready(self) -> None:
        """Wait for the first PONG."""
        self.child.wait_ready(self._answers, timeout_s=READY_TIMEOUT_S)

    @property
    def url(self) -> str:
        """Connection URL of database 0."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    def stop(self, *, timeout_s: float = 3.0) -> None:
        """End it; the append-only file keeps what it held."""
        self.child.stop(signal.SIGTERM, timeout_s=timeout_s)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1) as link:
            link.sendall(b"PING\r\n")
            return link.recv(16).startswith(b"+PONG")
        return False
