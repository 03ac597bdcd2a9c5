"""A fast webhook receiver for benchmarks, a process of its own: `python webhook_receiver.py PORT SEED`.

Paths: `/ok` answers 204; `/flaky` fails every second request at random, in one of several ways; `/hang` never
answers; `GET /log` returns every request of `/ok` and `/flaky` as JSON lines: path, webhook-id, id of the
video, Unix time, whether it was taken. One loop, no framework, so that the sender is what is measured.
"""

import asyncio
import json
import random
import sys
import time

FAILURES = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbroken off",
    b"",  # closed without an answer
    None,  # no answer until the sender gives up
)
TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"
TAKEN_BODY = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


class Receiver:
    """All requests so far."""

    def __init__(self, seed: int) -> None:
        self.lines: list[str] = []
        self.random = random.Random(seed)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection with one request."""
        try:
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            writer.write(TAKEN_BODY + "\n".join(self.lines).encode())
        elif path == "/hang":
            await asyncio.sleep(3600)
        else:
            answer = self._choose(path)
            video = json.loads(body)["data"]["id"]
            line = [path, headers["webhook-id"], video, time.time(), answer == TAKEN]
            self.lines.append(json.dumps(line))
            if answer is None:
                await asyncio.sleep(3600)
            else:
                writer.write(answer)
        await writer.drain()

    def _choose(self, path: str) -> bytes | None:
        is_failure = path == "/flaky" and self.random.random() < 0.5
        return self.random.choice(FAILURES) if is_failure else TAKEN


async def main() -> None:
    receiver = Receiver(int(sys.argv[2]))
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", int(sys.argv[1]), backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
