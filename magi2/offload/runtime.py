"""What a streamer needs of a device: streams, events, copies and gathers; and how CUDA gives them.

Promises: everything is enqueued and nothing waits for the whole device; order between streams comes from
declared waits alone. The host's version, which makes missing waits visible, is `magi2.offload.lazy`. It
knows no weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from magi2.parallel.groups import Group

# cudaHostRegister: pages that the device only reads, and the ordinary kind.
_REGISTER_READ_ONLY = 8
_REGISTER_DEFAULT = 0
_ABANDON_S = 10.0
_POLL_S = 0.01
# torch leaves these calls without types.
_cuda: Any = torch.cuda


class Stream(Enum):
    """The three queues of work; each runs in the order in which it was filled."""

    COMPUTE = "compute"
    COPY = "copy"
    COMM = "comm"


class Runtime(Protocol):
    """Streams, events, copies and gathers of one device."""

    device: torch.device
    # Whether the host may read device memory without a copy: only then stamps are checked.
    can_inspect: bool

    def record(self, stream: Stream) -> Any:
        """Return an event that is reached when the stream's work up to now is done."""

    def wait(self, stream: Stream, event: Any) -> None:
        """Let the stream's later work start only after an event."""

    def launch(self, work: Callable[[], None]) -> None:
        """Put work on the compute stream."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy of host memory into device memory on the copy stream."""

    def gather(self, group: Group, target: Tensor, part: Tensor) -> None:
        """Put a gather of all ranks' parts on the communication stream."""

    def synchronize(self, event: Any) -> None:
        """Let the host wait for one event."""

    def settle(self) -> None:
        """Make results of the compute stream's work usable for whoever comes next.

        Raises:
            Exception: Whatever launched work raised.
        """

    def abandon(self) -> None:
        """Forget work that has not begun; no collective is entered any more."""

    def register(self, memory: Tensor) -> bool:
        """Page-lock existing host memory, so that copies from it are asynchronous; say whether it worked."""

    def unregister(self, memory: Tensor) -> None:
        """Undo `register`."""


class CudaRuntime:
    """The CUDA version; the compute stream is the one that is current for the caller.

    Args:
        device: With an index.
    """

    can_inspect = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = {stream: _cuda.Stream(device) for stream in (Stream.COPY, Stream.COMM)}

    def record(self, stream: Stream) -> torch.cuda.Event:
        """Return an event recorded on the stream."""
        event: torch.cuda.Event = _cuda.Event()
        event.record(self.queue(stream))
        return event

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        """Let the stream wait; the host does not."""
        self.queue(stream).wait_event(event)

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue work now: kernels take the pointers that are bound while it runs."""
        work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy asynchronously; the source is page-locked."""
        with torch.cuda.stream(self.queue(Stream.COPY)):
            target.copy_(source, non_blocking=True)

    def gather(self, group: Group, target: Tensor, part: Tensor) -> None:
        """Gather on the communication stream; NCCL's own stream follows it."""
        with torch.cuda.stream(self.queue(Stream.COMM)):
            group.gather_into(target, part)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait on the host for one event."""
        event.synchronize()

    def settle(self) -> None:
        """Do nothing: later work on the compute stream is ordered behind earlier."""

    def abandon(self) -> None:
        """Let copies that are under way end before their memory goes; a lost peer is not waited for."""
        event: Any = self.record(Stream.COPY)
        patience_ends = time.monotonic() + _ABANDON_S
        while not event.query() and time.monotonic() < patience_ends:
            time.sleep(_POLL_S)

    def register(self, memory: Tensor) -> bool:
        """Page-lock an existing mapping, for reading only where the driver can, else in the ordinary way."""
        runtime = _cuda.cudart()
        with torch.cuda.device(self.device):
            for kind in (_REGISTER_READ_ONLY, _REGISTER_DEFAULT):
                if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, kind)) == 0:
                    return True
                self._forget_error()
        return False

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next launched kernel would otherwise be blamed for."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            return  # it was reported here, and is gone

    def unregister(self, memory: Tensor) -> None:
        """Unlock a mapping; copies from it must be over."""
        runtime = _cuda.cudart()
        runtime.cudaHostUnregister(memory.data_ptr())

    def queue(self, stream: Stream) -> torch.cuda.Stream:
        """Return the CUDA stream behind a name."""
        return self._side.get(stream) or torch.cuda.current_stream(self.device)
