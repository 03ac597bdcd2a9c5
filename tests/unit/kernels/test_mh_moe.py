"""Routing, sorting and running experts against a brute-force sum over all experts."""

import pytest
import torch
from torch import Tensor

from kernels import mh_moe
from kernels.mh_moe import ExpertWeights, Routes, choose_experts, route, routed_experts, sort_routes
from kernels.swiglu7 import swiglu7_pair


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts(heads: int, count: int, width: int, inner: int, dtype: torch.dtype) -> ExpertWeights:
    flat = heads * count
    shapes = [(flat, width, inner), (flat, width, inner), (flat, inner, width)]
    return ExpertWeights(*(0.3 * seeded(*s, seed=i).to(dtype) for i, s in enumerate(shapes)))


def brute_force(x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Every expert on every token in float64, weighted by a dense matrix of probabilities."""
    length, heads, _ = x.shape
    gate, up, down = (w.double().unflatten(0, (heads, -1)) for w in weights)
    hidden = swiglu7_pair_double(
        torch.einsum("lgd,gedf->gelf", x.double(), gate), torch.einsum("lgd,gedf->gelf", x.double(), up)
    )
    results = torch.einsum("gelf,gefd->gled", hidden, down)
    dense = torch.zeros(heads, length, gate.shape[1], dtype=torch.float64)
    dense.scatter_(-1, routes.experts, routes.weights.double())
    return torch.einsum("gled,gle->lgd", results, dense)


def swiglu7_pair_double(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)


def routed(length: int, heads: int, count: int, top_k: int, *, width: int = 8) -> tuple[Tensor, Routes]:
    x = seeded(length, heads, width, seed=3)
    gate, bias = seeded(heads, count, width, seed=4), 0.1 * seeded(heads, count, seed=5)
    return x, route(x, gate, bias, top_k=top_k, route_norm=True, route_scale=4.9)


@pytest.mark.parametrize("length", [1, 2, 37])
@pytest.mark.parametrize(("heads", "count", "top_k"), [(1, 4, 1), (3, 8, 2), (2, 5, 5), (4, 16, 6)])
def test_routed_experts_equal_the_dense_sum(length: int, heads: int, count: int, top_k: int) -> None:
    x, routes = routed(length, heads, count, top_k)
    weights = experts(heads, count, 8, 12, torch.float32)
    want = brute_force(x, routes, weights).float()
    torch.testing.assert_close(routed_experts(x, routes, weights), want, rtol=1e-4, atol=1e-4)


def test_bf16_experts_round_once_per_route_and_once_per_sum() -> None:
    x, routes = routed(25, 2, 6, 3)
    x = x.bfloat16()
    weights = experts(2, 6, 8, 12, torch.bfloat16)
    got = routed_experts(x, routes, weights)
    for token in range(25):
        for head in range(2):
            total = torch.zeros(8)
            for slot in range(3):
                flat = head * 6 + int(routes.experts[head, token, slot])
                row = x[token, head].float()
                hidden = swiglu7_pair(row @ weights.gate[flat].float(), row @ weights.up[flat].float())
                product = hidden.bfloat16().float() @ weights.down[flat].float()
                total += (product * routes.weights[head, token, slot]).bfloat16().float()
            torch.testing.assert_close(
                got[token, head].float(), total.bfloat16().float(), rtol=1e-2, atol=1e-2
            )


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, routes = routed(40, 2, 6, 3)
    weights = experts(2, 6, 8, 12, torch.float32)
    whole = routed_experts(x, routes, weights)
    monkeypatch.setitem(mh_moe._BLOCK_VALUES, "cpu", 12 * 7)
    torch.testing.assert_close(routed_experts(x, routes, weights), whole, rtol=1e-5, atol=1e-5)
    again = routed(40, 2, 6, 3)[1]
    assert torch.equal(again.experts, routes.experts)


def test_equal_inputs_give_equal_bits() -> None:
    x, routes = routed(33, 3, 8, 2)
    weights = experts(3, 8, 8, 12, torch.float32)
    assert torch.equal(routed_experts(x, routes, weights), routed_experts(x, routes, weights))


def test_no_tokens_give_no_rows() -> None:
    x, routes = routed(0, 2, 4, 2)
    assert routed_experts(x, routes, experts(2, 4, 8, 12, torch.float32)).shape == (0, 2, 8)


def test_ties_go_to_the_lowest_expert() -> None:
    logits = torch.zeros(1, 3, 6)
    logits[0, 1, 4] = 1.0
    routes = choose_experts(logits, torch.zeros(1, 6), top_k=2, route_norm=True, route_scale=1.0)
    assert routes.experts[0].tolist() == [[0, 1], [4, 0], [0, 1]]


def test_bias_chooses_but_does_not_weight() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0]]])
    bias = torch.tensor([[0.0, 0.0, 5.0]])
    routes = choose_experts(logits, bias, top_k=2, route_norm=True, route_scale=2.0)
    scores = torch.sigmoid(torch.tensor([0.0, 2.0]))
    assert routes.experts.tolist() == [[[2, 0]]]
    torch.testing.assert_close(routes.weights[0, 0], 2 * scores / scores.sum())


def test_weights_are_bare_scores_without_norm() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0]]])
    routes = choose_experts(logits, torch.zeros(1, 3), top_k=2, route_norm=False, route_scale=1.0)
    torch.testing.assert_close(routes.weights[0, 0], torch.sigmoid(torch.tensor([2.0, 1.0])))


def test_vanishing_scores_do_not_divide_by_zero() -> None:
    logits = torch.full((1, 1, 4), -200.0)
    routes = choose_experts(logits, torch.zeros(1, 4), top_k=2, route_norm=True, route_scale=4.9)
    assert routes.weights.tolist() == [[[0.0, 0.0]]]


def test_sort_keeps_tokens_ascending_inside_an_expert() -> None:
    chosen = torch.tensor([[[1, 0], [1, 2], [0, 1]]])
    grouped = sort_routes(chosen, 4)
    assert (grouped.order[0] // 2).tolist() == [0, 2, 0, 1, 2, 1]
    assert grouped.offsets[0].tolist() == [0, 2, 5, 6, 6]


def test_a_rank_may_run_its_own_heads() -> None:
    x, routes = routed(21, 4, 8, 2)
    weights = experts(4, 8, 8, 12, torch.float32)
    whole = routed_experts(x, routes, weights)
    own = Routes(routes.experts[2:], routes.weights[2:])
    shard = ExpertWeights(*(w[16:] for w in weights))
    assert torch.equal(routed_experts(x[:, 2:], own, shard), whole[:, 2:])
