"""The layout of streamed weights: for each piece and dtype one flat buffer of tensors in a fixed order.

A piece is what is streamed at once: a layer, or a part of one. Promises: offsets are multiples of 256 bytes,
dtypes never share a flat, and every flat begins with the number of its piece, its stamp; the layout follows
from names, shapes and dtypes alone, so ranks with equal tensors have equal flats. It reads no file and knows
no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

ALIGN_BYTES = 256
# Rows of a digest: small enough to stay in a cache, large enough to keep the loop short.
_DIGEST_WORDS = 1 << 20
_DIGEST_SEED = 20_260_101


@dataclass(frozen=True)
class Need:
    """Shape and dtype of a rank's own tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Record:
    """Where a tensor lies in its flat; offset and length in values, rows dense."""

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Flat:
    """All tensors of one dtype of a piece."""

    dtype: torch.dtype
    records: tuple[Record, ...]
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat."""
        return self.numel * self.dtype.itemsize

    def share_numel(self, parts: int) -> int:
        """Values of each of `parts` equal shares; the last ones are padded with zeros."""
        return ceil(self.numel / parts)

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as a view of a buffer that begins with this flat."""
        for record in self.records:
            yield record.name, buffer[record.offset : record.offset + record.numel].view(record.shape)


@dataclass(frozen=True)
class Piece:
    """The flats of one piece.

    Args:
        number: Its stamp.
        block: The layer that it is of, or belongs to.
        flats: One for each dtype.
    """

    number: int
    block: int
    flats: tuple[Flat, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all flats."""
        return sum(flat.nbytes for flat in self.flats)


def plan_piece(number: int, block: int, needs: Mapping[str, Need]) -> Piece:
    """Lay out the tensors of a piece, in the order of the mapping."""
    flats = []
    for dtype in dict.fromkeys(need.dtype for need in needs.values()):
        step = ALIGN_BYTES // dtype.itemsize
        end, records = step, []  # the first step holds the stamp
        for name, need in needs.items():
            if need.dtype is dtype:
                records.append(Record(name, end, prod(need.shape), need.shape))
                end += ceil(records[-1].numel / step) * step
        flats.append(Flat(dtype, tuple(records), end))
    return Piece(number, block, tuple(flats))


def stamp(buffer: Tensor, number: int) -> None:
    """Write the number of a piece to the head of its flat."""
    buffer[: ALIGN_BYTES // buffer.dtype.itemsize].view(torch.int64)[0] = number


def read_stamp(buffer: Tensor) -> int:
    """Return the number at the head of a flat that the host can read."""
    return int(buffer[: ALIGN_BYTES // buffer.dtype.itemsize].view(torch.int64)[0])


def share(whole: Tensor, parts: int, part: int) -> Tensor:
    """Return one of `parts` equal shares of a flat, padded with zeros to the common length."""
    length = ceil(whole.numel() / parts)
    own = whole[part * length : (part + 1) * length]
    if own.numel() == length:
        return own
    return torch.cat([own, own.new_zeros(length - own.numel())])


def digest(whole: Tensor) -> int:
    """Return 64 bits that depend on every value of a flat and its place.

    Products with odd weights, summed modulo 2^64: no defence against malice, but as fast as reading.
    """
    words = whole.view(torch.uint8).view(torch.int64)
    generator = torch.Generator().manual_seed(_DIGEST_SEED)
    size = min(_DIGEST_WORDS, words.numel())
    weights = torch.randint(-(2**62), 2**62, (size,), generator=generator) * 2 + 1
    total = 0
    for row in torch.split(words, size):
        part = int((row * weights[: row.numel()]).sum())
        total = (total * 6364136223846793005 + part) % 2**64
    return total - 2**63
