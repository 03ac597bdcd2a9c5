"""A running sum of fixed order, for the text tower in deterministic mode.

The library's gated delta rule sums its decays with `cumsum`, and torch's strict mode forbids that on
CUDA. Inside this mode each floating-point `cumsum` is written out as masked sums, which are allowed and
repeat bit for bit. Rows are short there (64 steps); the work grows with their square.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CUMSUMS = (torch.cumsum, Tensor.cumsum)


class FixedOrderScan(TorchFunctionMode):
    """Replaces `cumsum` of floating-point tensors while it is entered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its fixed-order form."""
        if func in _CUMSUMS and args[0].is_floating_point():
            return running_sum(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along a dimension up to and including each position.

    Args:
        x: Any float dtype and shape.
        dim: Of n positions; n times the memory of `x` is used for a moment.
    """
    rows = x.movedim(dim, -1)
    num = rows.shape[-1]
    is_summed = torch.ones(num, num, dtype=torch.bool, device=x.device).tril()
    return torch.where(is_summed, rows.unsqueeze(-2), 0).sum(dim=-1).movedim(-1, dim)
