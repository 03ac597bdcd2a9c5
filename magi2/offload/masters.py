"""The host's copies of streamed weights, and how they go to the device.

Promises: a master is written once, while loading, and never again; copies to the device are asynchronous,
from page-locked memory only: the master itself, or where the driver refuses to lock it, two bounded staging
buffers. Nothing ever comes back from the device.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from magi2.offload.flats import ALIGN_BYTES, Piece
from magi2.offload.runtime import Runtime, Stream

STAGING_BYTES = 64 * 2**20
_NUM_STAGING = 2

# A piece's flats, or this rank's shares of them.
Flats = Mapping[torch.dtype, Tensor]


class HostMemory(Protocol):
    """Memory of the host for one block after the other."""

    def block(self, block: int, nbytes: int) -> Tensor:
        """Return uint8 memory of a block, page-aligned; the same memory for the same block."""

    def digest_of(self, block: int) -> int | None:
        """Return the digest of a block that somebody has already written, else None."""

    def fill_done(self, block: int, digest: int) -> None:
        """Say that a block is written; it is read only from then on."""

    def close(self) -> None:
        """Let go of all memory."""


class PrivateMemory:
    """Anonymous mappings of this process, of exact size.

    torch's own pinned memory is rounded up to a power of two, which 5.8 GiB blocks cannot afford.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def block(self, block: int, nbytes: int) -> Tensor:
        """Map memory for a block."""
        if block not in self._blocks:
            self._blocks[block] = torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)
        return self._blocks[block]

    def digest_of(self, block: int) -> int | None:
        """Return None: this process alone writes."""
        del block
        return None

    def fill_done(self, block: int, digest: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Unmap, as soon as no view is left."""
        self._blocks.clear()


@dataclass(frozen=True)
class Extent:
    """Where the flats of a block's pieces lie in the block's memory, as bytes."""

    nbytes: int
    places: Mapping[tuple[int, torch.dtype], tuple[int, int]]


def extent_of(pieces: Sequence[Piece], parts: int) -> Extent:
    """Lay out the pieces of one block, each rank keeping one of `parts` shares."""
    places, end = {}, 0
    for piece in pieces:
        for flat in piece.flats:
            length = flat.share_numel(parts) * flat.dtype.itemsize
            places[piece.number, flat.dtype] = (end, length)
            end += -(-length // ALIGN_BYTES) * ALIGN_BYTES
    return Extent(end, places)


class Masters:
    """All masters of a ring of pieces.

    Args:
        runtime: Locks the memory.
        memory: Where the masters lie.
        pieces: By block, in the order of the ring.
        parts: Ranks that keep a share each.
    """

    def __init__(
        self, runtime: Runtime, memory: HostMemory, pieces: Mapping[int, Sequence[Piece]], parts: int
    ) -> None:
        self._runtime = runtime
        self._memory = memory
        self._extents = {block: extent_of(own, parts) for block, own in pieces.items()}
        self._flats: dict[int, dict[torch.dtype, Tensor]] = {}
        self._locked: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._free: list[Any] = [None] * _NUM_STAGING
        self._turn = 0

    @property
    def is_staged(self) -> bool:
        """Whether copies go through staging buffers, because masters could not be page-locked."""
        return bool(self._staging)

    @property
    def nbytes(self) -> int:
        """Bytes of the masters of this rank."""
        return sum(extent.nbytes for extent in self._extents.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes of those blocks that nobody has written yet."""
        missing = (e for block, e in self._extents.items() if self._memory.digest_of(block) is None)
        return sum(extent.nbytes for extent in missing)

    def open_block(self, block: int) -> dict[tuple[int, torch.dtype], Tensor]:
        """Return the writable flats of a block's pieces, by piece and dtype."""
        extent = self._extents[block]
        memory = self._memory.block(block, extent.nbytes)
        flats = {
            key: memory[start : start + length].view(key[1]) for key, (start, length) in extent.places.items()
        }
        for (number, dtype), flat in flats.items():
            self._flats.setdefault(number, {})[dtype] = flat
        return flats

    def lock(self) -> None:
        """Page-lock all blocks; where one is refused, keep none locked and make staging buffers."""
        for block, extent in self._extents.items():
            memory = self._memory.block(block, extent.nbytes)
            if not self._runtime.register(memory):
                self._unlock()
                self._staging = [_staging_buffer(self._runtime) for _ in range(_NUM_STAGING)]
                return
            self._locked.append(memory)

    def send(self, number: int, targets: Flats) -> None:
        """Enqueue the copies of a piece's flats into device buffers that begin with them."""
        for dtype, flat in self._flats[number].items():
            target = targets[dtype][: flat.numel()]
            if self._staging:
                self._send_staged(target, flat)
            else:
                self._runtime.copy(target, flat)

    def of(self, number: int) -> Flats:
        """Return the masters of a piece."""
        return self._flats[number]

    def close(self) -> None:
        """Unlock and let go."""
        self._unlock()
        self._flats.clear()
        self._staging.clear()
        self._memory.close()

    def _send_staged(self, target: Tensor, flat: Tensor) -> None:
        step = self._staging[0].numel() // flat.dtype.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            if self._free[self._turn] is not None:
                self._runtime.synchronize(self._free[self._turn])
            staging = self._staging[self._turn].view(flat.dtype)[: part.numel()]
            staging.copy_(part)
            self._runtime.copy(target[first : first + step], staging)
            self._free[self._turn] = self._runtime.record(Stream.COPY)
            self._turn = (self._turn + 1) % _NUM_STAGING

    def _unlock(self) -> None:
        for memory in self._locked:
            self._runtime.unregister(memory)
        self._locked.clear()


def _staging_buffer(runtime: Runtime) -> Tensor:
    # A power of two, so torch's rounding costs nothing.
    return torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=runtime.device.type == "cuda")
