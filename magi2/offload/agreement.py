"""All ranks start a streamed engine, or none: the budget of host memory, equal weights, and failures.

Promises: every rank comes to the same answer, from what all said; refusals carry the numbers. These are the
collectives of the start; none is entered later to undo anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi2.errors import EngineError, EngineFailure, LayoutError
from magi2.parallel.groups import Group

_GIB = 2**30


def agree_on_budget(world: Group, *, pinned_bytes: int, scratch_bytes: int, free_bytes: int) -> None:
    """Refuse before anything is page-locked if the ranks of this host together need more than it has.

    Args:
        world: All ranks; they run on one host.
        pinned_bytes: What this rank will lock.
        scratch_bytes: What it needs beside that while it loads.
        free_bytes: What the host has, as this rank sees it.

    Raises:
        LayoutError: On every rank alike.
    """
    said = world.stack(torch.tensor([pinned_bytes + scratch_bytes, free_bytes]))
    needed, free = int(said[:, 0].sum()), int(said[:, 1].min())
    if needed > free:
        each = ", ".join(f"{int(own) / _GIB:.2f}" for own in said[:, 0])
        raise LayoutError(
            f"{needed / _GIB:.2f} GiB of host memory are needed for streamed weights (ranks: {each} GiB), "
            f"{free / _GIB:.2f} GiB are free: nothing was page-locked; free memory, raise --ulysses or "
            "--data-parallel, or choose a layout with resident weights"
        )


def agree_on_success(world: Group, failure: Exception | None) -> None:
    """Go on only if no rank failed.

    Raises:
        Exception: This rank's own failure.
        EngineError: Another rank failed.
    """
    flags = world.stack(torch.tensor(0 if failure is None else 1)).tolist()
    if failure is not None:
        raise failure
    failed = [rank for rank, flag in zip(world.ranks, flags, strict=True) if flag]
    if failed:
        raise EngineError(f"loading failed on rank {', '.join(map(str, failed))}, so this rank stops too")


def agree_on_weights(weights: Group, digests: Sequence[int]) -> None:
    """Refuse to gather shares of different weights.

    Args:
        weights: Ranks that gather.
        digests: Of every block, whole, as this rank made it.

    Raises:
        EngineFailure: On every rank of the group; it names the first block that differs.
    """
    if weights.size == 1 or not digests:
        return
    said = weights.stack(torch.tensor(digests, dtype=torch.int64))
    differing = (said != said[:1]).any(dim=0).nonzero().flatten().tolist()
    if differing:
        raise EngineFailure(
            f"block {differing[0]} and {len(differing) - 1} others differ between the ranks "
            f"{', '.join(map(str, weights.ranks))}, which would gather each other's shares: every rank must "
            "read the same checkpoint with the same release"
        )
