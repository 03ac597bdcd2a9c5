"""The windows of the video decoder spread over ranks, and their frames brought to the first one.

Promises: the work of a window does not depend on where it is done, so the frames equal those of one rank bit
for bit; frames travel as bytes, from rank to rank, each window once. Any number of ranks, also more than
windows.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from magi2.parallel.groups import Group, Pending


def assign(weights: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of every window: the longest first, each to the rank with the least to do.

    Args:
        weights: Latent frames of the windows.
        num_ranks: How many share the work.
    """
    loads = [0] * num_ranks
    owners = [0] * len(weights)
    for window in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        owner = loads.index(min(loads))
        owners[window] = owner
        loads[owner] += weights[window]
    return owners


def spread(
    group: Group, owners: Sequence[int], shapes: Sequence[tuple[int, ...]], make: Callable[[int], Tensor]
) -> Iterator[Tensor]:
    """Make windows on their ranks; the first rank gets all of them in order, the others get none.

    Args:
        group: Ranks that share the work.
        owners: Position of the rank of every window.
        shapes: Of every window's frames.
        make: Returns one window's frames, uint8 on the CPU.

    Yields:
        On the first rank the frames of every window.
    """
    if group.position != 0:
        for window, owner in enumerate(owners):
            if owner == group.position:
                group.send(make(window).contiguous(), 0)
        return
    coming: dict[int, Pending] = {}
    for window, owner in enumerate(owners):
        if owner != 0:
            coming[window] = group.receive(torch.empty(shapes[window], dtype=torch.uint8), owner)
    for window in range(len(owners)):
        yield coming[window].wait() if window in coming else make(window)
