"""Packed attention with learned sinks: the definition, chunked over queries, and plain kernels corrected.

Promises: never a matrix of all queries by all keys; attention never crosses a segment; softmax and sinks
are fp32. `sink_correction` turns any kernel that returns its log-sum-exp into one with sinks. Which of them
runs is decided in `kernels.dispatch` alone.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# Scores of one chunk, all heads together: 64 MiB on the host, 1 GiB on a device.
_CHUNK_SCORES = {"cpu": 1 << 24}
_CHUNK_SCORES_DEVICE = 1 << 28
# Not public in torch, but the only CPU kernel that returns its log-sum-exp.
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def chunked_attention(
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHD: Tensor,
    sinks: Tensor,
    *,
    bounds: Sequence[int],
    softcap: float,
    scale: float,
) -> Tensor:
    """Attend inside each segment, softcapped, with learned sinks per attention head.

    Args:
        q_LHD: Queries, already normalized and rotated, in the activations' dtype.
        k_LHD, v_LHD: The same for keys and values; their heads may be fewer: query head h uses head
            h // (query heads / key heads).
        sinks: fp32 [sink tokens, query heads]; logits that join the denominator only, neither scaled nor
        capped. bounds: First row of each segment and the end, host integers. softcap: Logit cap; 0 or less
        means off. scale: Factor of the scores.

    Returns:
        [L, H, D] in the queries' dtype.
    Source: the reference, inference/model/magi2_preview.py. Differs: the sinks are inside the softmax, so the
        output is rounded once instead of twice.
    """
    out = torch.empty_like(q_LHD)
    if sinks.shape[0] == 0:
        sinks = sinks.new_full((1, sinks.shape[1]), -torch.inf)
    for start, stop in segments(bounds):
        k_HSD = _per_query_head(k_LHD[start:stop], q_LHD.shape[1]).transpose(0, 1).float()
        v_HSD = _per_query_head(v_LHD[start:stop], q_LHD.shape[1]).transpose(0, 1).float()
        budget = _CHUNK_SCORES.get(q_LHD.device.type, _CHUNK_SCORES_DEVICE)
        step = max(1, budget // (q_LHD.shape[1] * (stop - start)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            q_HSD = q_LHD[first:last].transpose(0, 1).float()
            out[first:last] = _attend(q_HSD, k_HSD, v_HSD, sinks, softcap, scale).transpose(0, 1)
    return out


def sdpa_cpu_attention(
    q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, sinks: Tensor, *, bounds: Sequence[int], scale: float
) -> Tensor:
    """Attend with torch's CPU flash kernel and the sink correction; arguments as for `chunked_attention`."""
    out = torch.empty_like(q_LHD)
    for start, stop in segments(bounds):
        q, k, v = (
            _per_query_head(x[start:stop], q_LHD.shape[1]).transpose(0, 1).unsqueeze(0)
            for x in (q_LHD, k_LHD, v_LHD)
        )
        plain, lse = getattr(torch.ops.aten, _CPU_FLASH)(q, k, v, scale=scale)
        out[start:stop] = sink_correction(plain[0].transpose(0, 1), lse[0].T, sinks)
    return out


def sink_correction(plain_LHD: Tensor, lse_LH: Tensor, sinks: Tensor) -> Tensor:
    """Scale the output of a plain softmax to what it would be with extra logits of zero value.

    Args:
        plain_LHD: Output of a kernel without sinks.
        lse_LH: fp32, its natural log-sum-exp; minus infinity where a row saw no key.
        sinks: fp32 [sink tokens, H].
    """
    factor = torch.sigmoid(lse_LH.float() - torch.logsumexp(sinks.float(), dim=0))
    return (plain_LHD.float() * factor[..., None]).to(plain_LHD.dtype)


def segments(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of every segment that has rows."""
    return ((start, stop) for start, stop in pairwise(bounds) if start < stop)


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, softcap: float, scale: float) -> Tensor:
    """Return the attention of one chunk of queries, all [H, rows, D] and fp32."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    sink = sinks.float().T[:, None, :]
    peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sink.amax(dim=-1, keepdim=True))
    weights = scores.sub_(peak).exp_()
    denominator = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - peak).sum(dim=-1, keepdim=True)
    return torch.bmm(weights, v).div_(denominator)


def _per_query_head(x_LHD: Tensor, num_heads: int) -> Tensor:
    repeats = num_heads // x_LHD.shape[1]
    return x_LHD if repeats == 1 else x_LHD.repeat_interleave(repeats, dim=1)
