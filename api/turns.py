"""Lets few submits of one account into the database at a time; the others wait here, in their order.

The submits of an account wait for each other's commit, which is what makes its counters exact. Were they
to wait inside the database, one account with many requests would hold every connection of the process,
and all others would be told that the database does not answer. Waiting here costs nobody anything.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# One that works and one that is ready to follow.
AT_A_TIME = 2


class Turns:
    """The turns of all accounts in this process."""

    def __init__(self, at_a_time: int = AT_A_TIME) -> None:
        """Start without anybody."""
        self._at_a_time = at_a_time
        self._lines: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, account_id: str) -> AsyncIterator[None]:
        """Wait until it is this request's turn among those of its account."""
        gate, num_waiting = self._lines.get(account_id, (asyncio.Semaphore(self._at_a_time), 0))
        self._lines[account_id] = (gate, num_waiting + 1)
        try:
            async with gate:
                yield
        finally:
            gate, num_waiting = self._lines[account_id]
            if num_waiting == 1:
                del self._lines[account_id]
            else:
                self._lines[account_id] = (gate, num_waiting - 1)
