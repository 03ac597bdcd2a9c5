"""A TCP proxy that can go silent: connections stay open, bytes wait, and arrive late when it speaks again."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards every connection to one port of this host, unless it is cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._start(self._accept)

    def cut(self) -> None:
        """Let nothing through any more; nobody is told."""
        self._flows.clear()

    def mend(self) -> None:
        """Deliver what has waited, and everything after it."""
        self._flows.set()

    def close(self) -> None:
        """Close all connections."""
        self.mend()
        for each in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
