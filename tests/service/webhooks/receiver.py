"""A webhook receiver on loopback that keeps what it was sent and answers, or does not, as a test tells it."""

import contextlib
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: failed handshakes and broken connections are what tests ask for."""


Behaviour = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Close without a word."""
    handler.close_connection = True


def break_off(handler: BaseHTTPRequestHandler) -> None:
    """Promise more than is sent, then close."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b"only this")
    handler.close_connection = True


def babble(handler: BaseHTTPRequestHandler) -> None:
    """Answer with something that is not HTTP."""
    handler.wfile.write(b"\x00\xffSSH-2.0-OpenSSH\r\n\r\n")
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte of the body now and then, for ever."""
    handler.send_response(200)
    handler.send_header("content-length", "100000")
    handler.end_headers()
    _slowly(handler, b"x")


def drip_head(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte of the head now and then, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
    _slowly(handler, b"x")


def gush(handler: BaseHTTPRequestHandler) -> None:
    """Send a body without end as fast as it is taken."""
    handler.send_response(200)
    handler.end_headers()
    while _write(handler, b"x" * 65_536):
        pass


def _slowly(handler: BaseHTTPRequestHandler, byte: bytes) -> None:
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s and _write(handler, byte):
        time.sleep(0.02)
    handler.close_connection = True


def _write(handler: BaseHTTPRequestHandler, data: bytes) -> bool:
    try:
        handler.wfile.write(data)
    except OSError:  # the sender has had enough
        return False
    return True


@dataclass
class Receiver:
    behaviour: Behaviour = field(default_factory=lambda: answer(204))
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    received: list[Received] = field(default_factory=list)

    def __post_init__(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(self.path, headers, body))
                receiver.behaviour(self)

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                receiver.received.append(Received(self.path, {}, b""))
                answer(200)(self)

            def finish(self) -> None:
                with contextlib.suppress(OSError):  # the sender has gone
                    super().finish()

        self.server = _Server((self.host, 0), Handler)
        if self.tls is not None:
            self.server.socket = self.tls.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/hook"

    @property
    def port(self) -> int:
        return self.server.server_port

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
