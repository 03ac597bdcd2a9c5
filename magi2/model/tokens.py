"""What every layer knows of the packed sequence: rows of one modality, and where attention may look.

Promises: the packed order itself, cut into blocks that hold one modality each and are small enough to work
on in fp32; no permutation, no device read. It holds no features.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from magi2.packing import Run

# Stream values of one block: 4 MiB of fp32 on the host (its caches), 512 MiB on a device.
_BLOCK_VALUES = {"cpu": 1 << 20}
_BLOCK_VALUES_DEVICE = 1 << 27
# Fewer rows would read wide matrices too often.
_MIN_ROWS = 256


@dataclass(frozen=True)
class Tokens:
    """The packed sequence, or this rank's slice of it, as the layers see it.

    Args:
        blocks: Rows of the slice in order, each block of one modality.
        segment_bounds: First row of each attention segment and the end, of the whole sequence.
        rope: fp32 [L, 2 * pairs] table of sines and cosines.
        lengths: Rows of every sequence-parallel rank; empty on one.
        moe_lengths: Those of the ranks that this one exchanges MoE heads with.
    """

    blocks: tuple[Run, ...]
    segment_bounds: tuple[int, ...]
    rope: Tensor
    lengths: tuple[int, ...] = ()
    moe_lengths: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the slice."""
        return self.rope.shape[0]


def cut(runs: Iterable[Run], width: int, device: torch.device) -> Iterator[Run]:
    """Cut runs into blocks of at most so many rows that `width` values a row fit the device's block size."""
    step = max(_MIN_ROWS, _BLOCK_VALUES.get(device.type, _BLOCK_VALUES_DEVICE) // width)
    for run in runs:
        for start in range(run.start, run.stop, step):
            yield Run(start, min(start + step, run.stop), run.modality)
