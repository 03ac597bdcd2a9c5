"""A load generator that costs little: HTTP/1.1 over plain asyncio streams, one connection per worker.

`open_loop` starts requests at fixed instants, whatever becomes of the earlier ones, and measures from the
instant that was planned; `closed_loop` keeps so many connections busy. Both return seconds per request, and
count what was not answered with 2xx, by status and the API's code: a number of errors alone explains nothing.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What came of many requests."""

    times_s: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    @property
    def errors(self) -> int:
        return self.reasons.total()

    def note(self, status: int, body: bytes) -> None:
        """Count an answer that is no success."""
        if 200 <= status < 300:
            return
        try:
            code = json.loads(body).get("code")
        except ValueError:
            code = None
        self.reasons[f"{status} {code}"] += 1

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.times_s)
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 1)

    @property
    def per_s(self) -> float:
        return round(len(self.times_s) / self.wall_s, 1)


def request_bytes(
    method: str,
    path: str,
    key: str,
    body: bytes = b"",
    media_type: str = "application/json",
    cookie: str | None = None,
) -> bytes:
    """Spell a request out."""
    head = f"{method} {path} HTTP/1.1\r\nHost: farm\r\nAuthorization: Bearer {key}\r\n"
    if cookie:
        head += f"Cookie: {cookie}\r\n"
    if body:
        head += f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            return int(head[9:12]), await reader.readexactly(length)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def ask_json(port: int, request: bytes) -> dict:
    """Ask once."""
    connection = Connection(port)
    try:
        status, body = await connection.ask(request)
        assert status == 200, body
        return json.loads(body)
    finally:
        connection.close()


async def open_loop(port: int, make: Callable[[int], bytes], per_s: float, seconds: float) -> Outcome:
    """Start requests at a fixed rate; a request that finds no free connection opens one."""
    outcome, free = Outcome(), [Connection(port) for _ in range(4)]
    started_s = time.perf_counter()

    async def one(number: int, due_s: float) -> None:
        connection = free.pop() if free else Connection(port)
        try:
            outcome.note(*await connection.ask(make(number)))
        except (OSError, asyncio.IncompleteReadError) as exc:
            outcome.reasons[type(exc).__name__] += 1
        outcome.times_s.append(time.perf_counter() - due_s)
        free.append(connection)

    async with asyncio.TaskGroup() as group:
        for number in range(int(per_s * seconds)):
            due_s = started_s + number / per_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(one(number, due_s))
    outcome.wall_s = time.perf_counter() - started_s
    for connection in free:
        connection.close()
    return outcome


async def closed_loop(port: int, make: Callable[[int], bytes], workers: int, seconds: float) -> Outcome:
    """Keep so many connections busy for so long."""
    outcome, until_s = Outcome(), time.perf_counter() + seconds
    started_s = time.perf_counter()
    numbers = iter(range(10**9))

    async def work() -> None:
        connection = Connection(port)
        while (begun_s := time.perf_counter()) < until_s:
            outcome.note(*await connection.ask(make(next(numbers))))
            outcome.times_s.append(time.perf_counter() - begun_s)
        connection.close()

    await asyncio.gather(*(work() for _ in range(workers)))
    outcome.wall_s = time.perf_counter() - started_s
    return outcome
