"""The host's streams: nothing runs when it is enqueued, and what runs first is a seeded shuffle.

Promises: work of one stream keeps its order, an event that was waited for comes first, and nothing else is
sure. So a wait that a streamer forgot shows up as wrong weights on a machine without a GPU, and a seed
repeats the order. All ranks of a layout use the same seed. It is also what streams blocks when the engine's
device is the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from magi2.errors import EngineError, EngineFailure, PeerLost
from magi2.offload.runtime import Stream
from magi2.parallel.groups import Group

# How many operations run after one was enqueued: often none, sometimes all that may.
_TURNS = (0, 0, 0, 1, 1, 2, 64)


@dataclass(frozen=True)
class Point:
    """An event: so many operations of a stream are done."""

    stream: Stream
    count: int


@dataclass(frozen=True, eq=False)
class _Operation:
    work: Callable[[], None] | None = None
    waits_for: Point | None = None


class HostRuntime:
    """Streams of the host.

    Args:
        seed: Of the order.
        registers: Whether `register` succeeds, as it does with CUDA on most machines.
    """

    can_inspect = True

    def __init__(self, *, seed: int = 0, registers: bool = True) -> None:
        self.device = torch.device("cpu")
        self.order: list[Stream] = []
        self._random = Random(seed)  # noqa: S311 - an order of execution, no secret
        self._registers = registers
        self._queues: dict[Stream, deque[_Operation]] = {stream: deque() for stream in Stream}
        self._enqueued = dict.fromkeys(Stream, 0)
        self._finished = dict.fromkeys(Stream, 0)
        self._failure: Exception | None = None

    def record(self, stream: Stream) -> Point:
        """Return the stream's present end."""
        return Point(stream, self._enqueued[stream])

    def wait(self, stream: Stream, event: Point) -> None:
        """Let the stream go on only after a point."""
        self._enqueue(stream, _Operation(waits_for=event))

    def launch(self, work: Callable[[], None]) -> None:
        """Put work on the compute stream; what it raises is raised by `settle`."""
        self._enqueue(Stream.COMPUTE, _Operation(lambda: self._compute(work)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy at some later time."""
        self._enqueue(Stream.COPY, _Operation(lambda: _copy(target, source)))

    def gather(self, group: Group, target: Tensor, part: Tensor) -> None:
        """Gather at some later time."""
        self._enqueue(Stream.COMM, _Operation(lambda: group.gather_into(target, part)))

    def synchronize(self, event: Point) -> None:
        """Run operations until the point is reached."""
        while self._finished[event.stream] < event.count:
            self._step()

    def settle(self) -> None:
        """Run until all computing and all collectives are done, so that no peer waits for this rank.

        Raises:
            Exception: What launched work raised; all work that was enqueued has been passed by then.
        """
        while self._queues[Stream.COMPUTE] or self._queues[Stream.COMM]:
            self._step()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Drop what has not begun."""
        for stream, queue in self._queues.items():
            self._finished[stream] += len(queue)
            queue.clear()
        self._failure = None

    def register(self, memory: Tensor) -> bool:
        """Say what the constructor was told; host memory needs nothing."""
        del memory
        return self._registers

    def unregister(self, memory: Tensor) -> None:
        """Do nothing."""

    def _enqueue(self, stream: Stream, operation: _Operation) -> None:
        self._queues[stream].append(operation)
        self._enqueued[stream] += 1
        for _ in range(self._random.choice(_TURNS)):
            if not self._runnable():
                return
            self._step()

    def _runnable(self) -> list[Stream]:
        return [stream for stream, queue in self._queues.items() if queue and self._may_run(queue[0])]

    def _may_run(self, operation: _Operation) -> bool:
        event = operation.waits_for
        return event is None or self._finished[event.stream] >= event.count

    def _step(self) -> None:
        runnable = self._runnable()
        if not runnable:
            raise EngineError("streams wait for each other: an event is waited for that nothing records")
        stream = self._random.choice(runnable)
        operation = self._queues[stream].popleft()
        if operation.work is not None:
            operation.work()
            self.order.append(stream)
        self._finished[stream] += 1

    def _compute(self, work: Callable[[], None]) -> None:
        """Run work unless something before it failed; a lost peer ends the process and is raised at once."""
        if self._failure is not None:
            return
        try:
            work()
        except PeerLost:
            raise
        except (EngineFailure, RuntimeError, MemoryError) as error:
            self._failure = error


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
