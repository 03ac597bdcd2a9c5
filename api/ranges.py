"""The Range header: one range of bytes or none, read in linear time; and the bytes themselves, streamed.

More than one range means the whole file, as does a header that is not understood: RFC 9110 allows both, and
neither lets a client make the server do more than it asked for.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass

from farm.storage import ObjectBody

CHUNK_BYTES = 256 * 1024

_ONE_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.ASCII)


@dataclass(frozen=True)
class Span:
    """Bytes from `start` to `end`, both included."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Return its length."""
        return self.end - self.start + 1


class UnsatisfiableRangeError(Exception):
    """The range lies outside the file."""


def read_range(header: str | None, num_bytes: int) -> Span | None:
    """Return the range that a header asks for; None means the whole file.

    Raises:
        UnsatisfiableRangeError: It starts behind the end, or asks for the last zero bytes.
    """
    match = _ONE_RANGE.fullmatch(header or "")
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        start, end = max(0, num_bytes - int(match[2])), num_bytes - 1
        if int(match[2]) == 0:
            raise UnsatisfiableRangeError
    else:
        start = int(match[1])
        end = min(int(match[2]), num_bytes - 1) if match[2] else num_bytes - 1
        if match[2] and int(match[2]) < start:
            return None
    if start >= num_bytes:
        raise UnsatisfiableRangeError
    return Span(start, end)


async def stream(body: ObjectBody, pool: Executor) -> AsyncIterator[bytes]:
    """Pass the bytes of the store on, read in threads; the connection goes back however it ends."""
    loop = asyncio.get_running_loop()
    try:
        while chunk := await loop.run_in_executor(pool, body.read, CHUNK_BYTES):
            yield chunk
    finally:
        body.close()
