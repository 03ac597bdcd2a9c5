"""Packed attention on a CUDA device by the kernels that torch brings, with the sink correction.

Promises: one kernel call a segment, the kernel's own fp32 log-sum-exp, no score matrix. Takes no softcap: the
dispatcher must not send one here. It chooses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.attention import segments, sink_correction

# aten operator and its arguments between the values and the scale: no mask or bias, keep the log-sum-exp,
# no dropout.
_KERNELS: dict[str, tuple[str, tuple[object, ...]]] = {
    "cudnn": ("_scaled_dot_product_cudnn_attention", (None, True, 0.0, False, False)),
    "flash2": ("_scaled_dot_product_flash_attention", (0.0, False, False)),
    "efficient": ("_scaled_dot_product_efficient_attention", (None, True, 0.0, False)),
}


def cuda_attention(
    name: str,
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHD: Tensor,
    sinks: Tensor,
    *,
    bounds: Sequence[int],
    scale: float,
    correct: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Attend with the kernel of that name.

    Args:
        name: A key of the table above.
        q_LHD, k_LHD, v_LHD, sinks, bounds, scale: As for `kernels.attention.chunked_attention`.
        correct: Writes the sink-corrected output of a segment (output, log-sum-exp [L, H], sinks, target).
    """
    correct = correct or _correct
    operator, arguments = _KERNELS[name]
    repeats = q_LHD.shape[1] // k_LHD.shape[1]
    if repeats > 1:
        k_LHD, v_LHD = (x.repeat_interleave(repeats, dim=1) for x in (k_LHD, v_LHD))
    out = torch.empty_like(q_LHD)
    for start, stop in segments(bounds):
        q, k, v = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q_LHD, k_LHD, v_LHD))
        plain, lse, *_ = getattr(torch.ops.aten, operator)(q, k, v, *arguments, scale=scale)
        # The log-sum-exp may carry a last dim of one (cuDNN) or be padded to whole tiles (efficient).
        lse_HL = lse[0].reshape(q.shape[1], -1)[:, : stop - start]
        correct(plain[0].transpose(0, 1), lse_HL.T, sinks, out[start:stop])
    return out


def _correct(plain_LHD: Tensor, lse_LH: Tensor, sinks: Tensor, into_LHD: Tensor) -> None:
    into_LHD.copy_(sink_correction(plain_LHD, lse_LH, sinks))
