"""Routing and experts on a CUDA device against the same definition on the CPU."""

import torch
from torch import Tensor

from kernels.mh_moe import ExpertWeights, Routes, choose_experts, route, routed_experts
from tests import tolerances

HEADS, EXPERTS, TOP_K, WIDTH, INNER, LENGTH = 3, 8, 2, 256, 1280, 777


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routed(device: torch.device) -> tuple[Tensor, Routes]:
    x = seeded(LENGTH, HEADS, WIDTH).bfloat16().to(device)
    gate = 0.05 * seeded(HEADS, EXPERTS, WIDTH, seed=1).to(device)
    bias = 0.1 * seeded(HEADS, EXPERTS, seed=2).to(device)
    return x, route(x, gate, bias, top_k=TOP_K, route_norm=True, route_scale=4.9)


def experts(device: torch.device) -> ExpertWeights:
    flat = HEADS * EXPERTS
    shapes = [(flat, WIDTH, INNER), (flat, WIDTH, INNER), (flat, INNER, WIDTH)]
    return ExpertWeights(*(0.05 * seeded(*s, seed=k).bfloat16().to(device) for k, s in enumerate(shapes)))


def test_routes_equal_those_of_the_cpu(device: torch.device) -> None:
    got, want = routed(device)[1], routed(torch.device("cpu"))[1]
    assert torch.equal(got.experts.cpu(), want.experts)
    torch.testing.assert_close(got.weights.cpu(), want.weights, **tolerances.DIT_FP32)


def test_ties_go_to_the_lowest_expert(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, 256, device=device)
    bias = torch.zeros(2, 256, device=device)
    routes = choose_experts(logits, bias, top_k=6, route_norm=True, route_scale=1.0)
    assert torch.equal(routes.experts, torch.arange(6, device=device).expand_as(routes.experts))


def test_experts_equal_those_of_the_cpu(device: torch.device) -> None:
    cpu = torch.device("cpu")
    x, routes = routed(cpu)
    want = routed_experts(x, routes, experts(cpu)).float()
    moved = Routes(*(t.to(device) for t in routes))
    got = routed_experts(x.to(device), moved, experts(device)).float().cpu()
    error = got - want
    assert float(error.norm() / want.norm()) <= tolerances.DIT_BF16_MODULE
    per_token = error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert float(per_token.max()) <= tolerances.DIT_BF16_TOKEN


def test_equal_inputs_give_equal_bits(device: torch.device) -> None:
    x, routes = routed(device)
    weights = experts(device)
    assert torch.equal(routed_experts(x, routes, weights), routed_experts(x, routes, weights))
