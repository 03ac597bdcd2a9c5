"""Multi-head mixture of experts: route, sort, expert products, deterministic sum: the definition.

Every MoE head routes its own slice of a token to K of its own E experts. Promises: ties go to the lowest
expert, sorts are stable, every route's result is kept apart and summed in slot order in fp32, so equal
inputs give equal bits. Work goes in blocks of rows, so that the experts' inner width never meets all routes
at once. Nothing is dropped, and it works on any number of MoE heads, so that a rank may pass its own.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.swiglu7 import swiglu7_pair

NORM_EPS = 1e-12
# Values of one block, widest tensor: 4 MiB of fp32 on the host, 512 MiB on a device.
_BLOCK_VALUES = {"cpu": 1 << 20}
_BLOCK_VALUES_DEVICE = 1 << 27


class Routes(NamedTuple):
    """Chosen experts int64 [G, L, K], 0..E-1 in each MoE head, and their fp32 weights [G, L, K]."""

    experts: Tensor
    weights: Tensor


class SortedRoutes(NamedTuple):
    """Routes of all MoE heads grouped by expert.

    Args:
        order: int64 [G, L*K]: which route of the head stands at each sorted place.
        offsets: int64 [G, E + 1]: first sorted place of each expert, and the end.
    """

    order: Tensor
    offsets: Tensor


class ExpertWeights(NamedTuple):
    """Matrices of G*E experts, input-major, in the activations' dtype: [G*E, D, F] twice and [G*E, F, D]."""

    gate: Tensor
    up: Tensor
    down: Tensor


def router_logits(x_LGD: Tensor, gate_GED: Tensor) -> Tensor:
    """Return fp32 [G, L, E]: every MoE head's slice against its experts' fp32 gate vectors."""
    return torch.bmm(x_LGD.transpose(0, 1).float(), gate_GED.transpose(1, 2))


def choose_experts(
    logits_GLE: Tensor, bias_GE: Tensor, *, top_k: int, route_norm: bool, route_scale: float
) -> Routes:
    """Choose by biased score and weight by the score itself.

    Args:
        logits_GLE: fp32.
        bias_GE: fp32; decides who is chosen, never the weight.
        top_k: Experts per token and MoE head.
        route_norm: Divide the chosen scores by their sum.
        route_scale: Factor of the weights.
    """
    scores = torch.sigmoid(logits_GLE)
    biased = scores + bias_GE[:, None]
    chosen = []
    for _ in range(top_k):
        # max over a dim returns the first of equals, which topk does not promise.
        index = biased.max(dim=-1, keepdim=True).indices
        chosen.append(index)
        biased.scatter_(-1, index, -torch.inf)
    experts = torch.cat(chosen, dim=-1)
    weights = scores.gather(-1, experts)
    if route_norm:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(NORM_EPS)
    return Routes(experts, weights * route_scale)


def route(
    x_LGD: Tensor, gate_GED: Tensor, bias_GE: Tensor, *, top_k: int, route_norm: bool, route_scale: float
) -> Routes:
    """Route every token in every MoE head, without keeping the scores of all tokens.

    A head's result does not depend on the heads beside it.

    Source: the reference, inference/flash_mh_moe. Differs: ties are decided.
    """
    num_heads, num_experts = bias_GE.shape
    shape = (num_heads, x_LGD.shape[0], top_k)
    experts = torch.empty(shape, dtype=torch.int64, device=x_LGD.device)
    weights = torch.empty(shape, dtype=torch.float32, device=x_LGD.device)
    for head in range(num_heads):
        # Alone: on a CPU the bits of a sigmoid depend on how many values stand before it.
        own = slice(head, head + 1)
        for rows in _row_blocks(x_LGD.shape[0], num_experts, x_LGD.device):
            experts[own, rows], weights[own, rows] = choose_experts(
                router_logits(x_LGD[rows, own], gate_GED[own]),
                bias_GE[own],
                top_k=top_k,
                route_norm=route_norm,
                route_scale=route_scale,
            )
    return Routes(experts, weights)


def sort_routes(experts_GLK: Tensor, num_experts: int) -> SortedRoutes:
    """Group the routes of every MoE head by expert, tokens ascending inside an expert."""
    ordered = experts_GLK.flatten(1).sort(dim=1, stable=True)
    edges = torch.arange(num_experts + 1, device=experts_GLK.device).expand(experts_GLK.shape[0], -1)
    offsets = torch.searchsorted(ordered.values, edges.contiguous())
    return SortedRoutes(ordered.indices, offsets)


def routed_experts(x_LGD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Run the chosen experts and sum their weighted results.

    Args:
        x_LGD: Activations' dtype.
        routes: Of the same tokens and MoE heads.
        weights: Of the same MoE heads, flat index head * E + expert.

    Returns:
        [L, G, D] in the dtype of `x_LGD`.
    Source: the reference, inference/flash_mh_moe. Differs: the K results are summed in fp32 and rounded once,
        in slot order, instead of by bf16 atomics.
    """
    num_heads = x_LGD.shape[1]
    num_experts = weights.gate.shape[0] // num_heads
    grouped = sort_routes(routes.experts, num_experts)
    offsets: list[list[int]] = grouped.offsets.tolist()
    out = torch.empty_like(x_LGD)
    for head in range(num_heads):
        experts = slice(head * num_experts, (head + 1) * num_experts)
        own = ExpertWeights(weights.gate[experts], weights.up[experts], weights.down[experts])
        x_LD, route_weights = x_LGD[:, head], routes.weights[head].flatten()
        results = _run_head(x_LD, route_weights, grouped.order[head], offsets[head], own)
        out[:, head] = _sum_slots(results, grouped.order[head], routes.experts.shape[2])
    return out


def _run_head(
    x_LD: Tensor, route_weights: Tensor, order: Tensor, offsets: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Return the weighted result of every route of one MoE head, in sorted order."""
    num_routes, width = order.shape[0], weights.gate.shape[2]
    top_k = num_routes // max(1, x_LD.shape[0])
    results = x_LD.new_empty(num_routes, x_LD.shape[1])
    for rows in _row_blocks(num_routes, width, x_LD.device):
        places = order[rows]
        inputs = x_LD.index_select(0, places // top_k)
        pieces = list(_pieces(offsets, rows))
        gate = _expert_products(inputs, weights.gate, pieces)
        up = _expert_products(inputs, weights.up, pieces)
        hidden = swiglu7_pair(gate, up).to(x_LD.dtype)
        products = _expert_products(hidden, weights.down, pieces)
        results[rows] = products * route_weights[places][:, None]
    return results


def _sum_slots(results: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Bring sorted results back to their tokens and add the K slots of a token in order, in fp32."""
    num_routes = order.shape[0]
    place_of_route = torch.empty_like(order)
    place_of_route[order] = torch.arange(num_routes, device=order.device)
    place_LK = place_of_route.view(-1, top_k)
    total = results.index_select(0, place_LK[:, 0]).float()
    for slot in range(1, top_k):
        total += results.index_select(0, place_LK[:, slot])
    return total.to(results.dtype)


def _expert_products(rows: Tensor, matrices: Tensor, pieces: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return fp32 products of each piece (expert, start, stop) of `rows` with its expert's matrix."""
    out = torch.empty(rows.shape[0], matrices.shape[2], dtype=torch.float32, device=rows.device)
    is_low_precision = rows.dtype != torch.float32
    if is_low_precision and not rows.is_cuda:
        rows = rows.float()
    for expert, start, stop in pieces:
        if is_low_precision and rows.is_cuda:
            torch.mm(rows[start:stop], matrices[expert], out_dtype=torch.float32, out=out[start:stop])
        else:
            torch.mm(rows[start:stop], matrices[expert].float(), out=out[start:stop])
    return out


def _pieces(offsets: Sequence[int], rows: slice) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, start, stop) for the experts that own some of the sorted `rows`, from its start."""
    expert = max(0, bisect_right(offsets, rows.start) - 1)
    while expert + 1 < len(offsets) and offsets[expert] < rows.stop:
        start, stop = max(offsets[expert], rows.start), min(offsets[expert + 1], rows.stop)
        if start < stop:
            yield expert, start - rows.start, stop - rows.start
        expert += 1


def _row_blocks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES.get(device.type, _BLOCK_VALUES_DEVICE) // width)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))
