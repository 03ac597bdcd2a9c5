"""Pieces of weights that take turns in a few device buffers, brought while the piece before them computes.

Promises: buffers are allocated once; a slot is carried forward from the fetch that filled it, so rings may
be odd and their pieces of any size; a slot is written only after the computing that read it, and read only
after it was written, by events; weights are bound to modules only while their piece is being launched;
nothing comes back from the device. With ranks that share the weights, each brings its share and all gather. A
piece that was skipped is fetched when it is entered. It knows neither layers nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from magi2.errors import EngineError
from magi2.offload.flats import Piece, read_stamp
from magi2.offload.masters import Masters
from magi2.offload.runtime import Runtime, Stream
from magi2.parallel.groups import ALONE, Group

NUM_SLOTS = 2
# By name, the tensors of modules that stand for a piece's weights: `.data` is replaced.
Targets = Mapping[str, Tensor]


class Meter(Protocol):
    """Takes the times of a ring; each call encloses what it measures by two of the runtime's events."""

    def event(self, stream: Stream) -> Any:
        """Return an event with a time."""

    def copied(self, number: int, begin: Any, end: Any) -> None:
        """Take the copy of a piece."""

    def waited(self, number: int, begin: Any, end: Any) -> None:
        """Take the time that computing stood still for a piece."""


@dataclass(eq=False)
class Slot:
    """Device buffers of one piece at a time.

    Args:
        flats: By dtype, as large as the largest piece's.
        shares: What this rank brings, where several gather.
        holds: Place in the ring of the piece that is, or is on its way, inside.
        ready: Reached when it has arrived.
        free: Reached when the computing that read the slot is done.
    """

    flats: dict[torch.dtype, Tensor]
    shares: dict[torch.dtype, Tensor] = field(default_factory=dict)
    holds: int | None = None
    ready: Any = None
    free: Any = None


class Ring:
    """The streamed pieces of a network.

    Args:
        runtime: Of the device.
        pieces: In the order in which they run; at least two.
        targets: For each, the module tensors that its weights are bound to.
        masters: The host's copies, or this rank's shares of them.
        num_slots: Pieces on the device at once.
        group: Ranks that gather each other's shares.
    """

    def __init__(
        self,
        runtime: Runtime,
        pieces: Sequence[Piece],
        targets: Sequence[Targets],
        masters: Masters,
        *,
        num_slots: int = NUM_SLOTS,
        group: Group = ALONE,
    ) -> None:
        if len(pieces) < 2 or num_slots < 2:
            raise EngineError(f"a ring needs two pieces and two slots (got {len(pieces)} and {num_slots})")
        self.meter: Meter | None = None
        self.passes = 0
        self._runtime, self._pieces, self._masters, self._group = runtime, pieces, masters, group
        self._targets = targets
        self._slots = [self._make_slot() for _ in range(num_slots)]
        self._cursor = 0
        self._next = 0
        self._empty = {
            dtype: torch.empty(0, dtype=dtype, device=runtime.device) for dtype in self._slots[0].flats
        }
        self._release(range(len(pieces)))

    @property
    def size(self) -> int:
        """How many pieces there are."""
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        """Device memory of the slots."""
        buffers = (buffer for slot in self._slots for buffer in (*slot.flats.values(), *slot.shares.values()))
        return sum(buffer.nbytes for buffer in buffers)

    def run(self, place: int, work: Callable[[], None]) -> None:
        """Launch work that uses the weights of one piece, and bring those that come next.

        Args:
            place: Of the piece in the ring.
            work: Enqueues its computing; reads the bound weights while it runs, and never later.
        """
        slot = self._holding(place) or self._fetch(place)
        if not self._masters.is_staged:
            self._fetch_ahead(place)
        self._wait(place, slot)
        self._next = place + 1
        try:
            self._runtime.launch(lambda: self._bound(place, slot, work))
        finally:
            slot.free = self._runtime.record(Stream.COMPUTE)
        if self._masters.is_staged:  # the host copies while the device computes
            self._fetch_ahead(place)
        if self._next == self.size:
            self._next, self.passes = 0, self.passes + 1

    def pass_by(self) -> None:
        """Bring what is left of this pass, as ranks that gather with this one need, and compute nothing."""
        for place in range(self._next, self.size):
            self.run(place, _nothing)
        self._runtime.settle()

    @property
    def is_between_passes(self) -> bool:
        """Whether the last pass is complete."""
        return self._next == 0

    def close(self) -> None:
        """Take the weights from the modules and free all memory; no collective is entered."""
        self._runtime.abandon()
        self._release(range(self.size))
        self._slots.clear()
        self._masters.close()

    def _make_slot(self) -> Slot:
        flats, shares = {}, {}
        device, parts = self._runtime.device, self._group.size
        for dtype in dict.fromkeys(flat.dtype for piece in self._pieces for flat in piece.flats):
            most = max(
                flat.share_numel(parts)
                for piece in self._pieces
                for flat in piece.flats
                if flat.dtype is dtype
            )
            flats[dtype] = torch.empty(most * parts, dtype=dtype, device=device)
            if parts > 1:
                shares[dtype] = torch.empty(most, dtype=dtype, device=device)
        return Slot(flats, shares)

    def _holding(self, place: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.holds == place), None)

    def _fetch_ahead(self, place: int) -> None:
        for ahead in range(1, min(len(self._slots), self.size)):
            coming = (place + ahead) % self.size
            if self._holding(coming) is None:
                if self._slots[self._cursor].holds == place:  # after a skip it may be its turn
                    self._cursor = (self._cursor + 1) % len(self._slots)
                self._fetch(coming)

    def _fetch(self, place: int) -> Slot:
        """Enqueue the way of a piece into the slot whose turn it is."""
        slot = self._slots[self._cursor]
        self._cursor = (self._cursor + 1) % len(self._slots)
        slot.holds = place
        runtime, piece = self._runtime, self._pieces[place]
        for event in (slot.free, slot.ready):
            if event is not None:
                runtime.wait(Stream.COPY, event)
        begin = self._time(Stream.COPY)
        self._masters.send(piece.number, slot.shares or slot.flats)
        if self.meter is not None:
            self.meter.copied(piece.number, begin, self._time(Stream.COPY))
        if self._group.size == 1:
            slot.ready = runtime.record(Stream.COPY)
            return slot
        runtime.wait(Stream.COMM, runtime.record(Stream.COPY))
        for flat in piece.flats:
            length = flat.share_numel(self._group.size)
            # The collective checks sizes: exactly the shares, not the whole slot.
            whole = slot.flats[flat.dtype][: length * self._group.size]
            runtime.gather(self._group, whole, slot.shares[flat.dtype][:length])
        slot.ready = runtime.record(Stream.COMM)
        return slot

    def _wait(self, place: int, slot: Slot) -> None:
        begin = self._time(Stream.COMPUTE)
        self._runtime.wait(Stream.COMPUTE, slot.ready)
        if self.meter is not None:
            self.meter.waited(self._pieces[place].number, begin, self._time(Stream.COMPUTE))

    def _time(self, stream: Stream) -> Any:
        return None if self.meter is None else self.meter.event(stream)

    def _bound(self, place: int, slot: Slot, work: Callable[[], None]) -> None:
        """Run work while the modules' tensors are views of the slot."""
        piece, targets = self._pieces[place], self._targets[place]
        for flat in piece.flats:
            buffer = slot.flats[flat.dtype]
            if self._runtime.can_inspect and (found := read_stamp(buffer)) != piece.number:
                raise EngineError(f"piece {piece.number} was about to run on the bytes of piece {found}")
            for name, view in flat.views(buffer):
                targets[name].data = view
        try:
            work()
        finally:
            self._release([place])

    def _release(self, places: Iterable[int]) -> None:
        for place in places:
            for tensor in self._targets[place].values():
                tensor.data = self._empty[tensor.dtype]


def _nothing() -> None:
    """Compute nothing."""
