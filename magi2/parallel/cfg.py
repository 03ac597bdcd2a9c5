"""Branch parallelism: each rank predicts one branch, and every rank gets both.

Promises: one exchange a step; both ranks then hold the same bits and guide and solve alike, so nothing is
sent back. It guides nothing.
"""

import torch
from torch import Tensor

from magi2.parallel.groups import Group


def join_branches(group: Group, video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predictions of all branches.

    Args:
        group: Rank b predicted branch b; or one rank, which predicted all.
        video, audio: fp32, [1, ...] each where there are several ranks.

    Returns:
        [branches, ...] each.
    """
    if group.size == 1:
        return video, audio
    both = group.stack(torch.cat([video.flatten(), audio.flatten()]))
    videos, audios = torch.split(both, [video.numel(), audio.numel()], dim=1)
    return videos.reshape(group.size, *video.shape[1:]), audios.reshape(group.size, *audio.shape[1:])
