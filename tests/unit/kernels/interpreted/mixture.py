"""Choice of experts, counting sort, tiles and the sum of slots, interpreted: against their definitions."""

import pytest
import torch
from torch import Tensor

from kernels import mh_moe
from kernels.gpu import experts, routing
from kernels.mh_moe import ExpertWeights, Routes
from tests.unit.kernels.interpreted import exact
from tests.unit.kernels.interpreted.exact import draw, fp32, poison

exact.use()

SETTINGS = {"top_k": 6, "route_norm": True, "route_scale": 4.9}
KINDS = ["spread", "most experts empty", "all to the same"]


def routes_of(length: int, heads: int, num_experts: int, kind: str) -> Routes:
    """Return routes that leave experts empty, or send every token to the same ones."""
    if kind == "all to the same":
        chosen = torch.arange(6).expand(heads, length, 6).contiguous() + num_experts - 6
    else:
        count = num_experts if kind == "spread" else 8
        chosen = torch.rand(heads, length, count).argsort(dim=-1)[..., :6].contiguous()
    return Routes(chosen, torch.rand(chosen.shape))


@pytest.mark.parametrize("length", [1, 63, 130])
@pytest.mark.parametrize(
    ("heads", "num_experts", "width", "top_k", "is_normed"),
    [(1, 8, 64, 6, True), (2, 32, 128, 8, False), (3, 256, 256, 6, True), (2, 16, 64, 1, True)],
)
def test_route(length: int, heads: int, num_experts: int, width: int, top_k: int, *, is_normed: bool) -> None:
    settings = {"top_k": top_k, "route_norm": is_normed, "route_scale": 4.9}
    x = draw(length, heads + 1, width)[:, 1:]  # the heads of a rank are a view
    gate, bias = fp32(heads, num_experts, width, scale=width**-0.5), fp32(heads, num_experts, scale=0.05)
    got, want = routing.route(x, gate, bias, **settings), mh_moe.route(x, gate, bias, **settings)
    exact_scores = torch.einsum("lgd,ged->gle", x.double(), gate.double()).sigmoid() + bias[:, None]
    gap = exact_scores.gather(2, got.experts) - exact_scores.gather(2, want.experts)
    assert float(gap.abs().max()) <= 1e-6
    same = (got.experts == want.experts).all(dim=-1)
    torch.testing.assert_close(got.weights[same], want.weights[same], rtol=1e-5, atol=1e-6)
    assert float(same.float().mean()) >= 0.99


def test_ties_go_to_the_lowest_expert_and_no_token_is_no_route() -> None:
    x, gate, bias = draw(70, 2, 64), torch.zeros(2, 32, 64), torch.zeros(2, 32)
    routes = routing.route(x, gate, bias, **SETTINGS)
    assert torch.equal(routes.experts, torch.arange(6).expand_as(routes.experts))
    assert routing.route(x[:0], gate, bias, **SETTINGS).experts.shape == (2, 0, 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "length", "num_experts"), [(3, 1, 32), (1, 22, 256), (3, 21, 8), (2, 131, 32)]
)
def test_sort_is_stable_and_tiles_cover_every_route_once(
    heads: int, length: int, num_experts: int, kind: str
) -> None:
    rows = 16
    routes = routes_of(length, heads, num_experts, kind)
    tiles = routing.sort_into_tiles(routes.experts, num_experts, rows)
    own = mh_moe.sort_routes(routes.experts, num_experts)
    shift = torch.arange(heads)[:, None] * (length * 6)
    assert torch.equal(tiles.order, (own.order + shift).flatten().int())
    flat = (routes.experts + num_experts * torch.arange(heads)[:, None, None]).flatten()
    count, covered = int(tiles.total), []
    assert count <= tiles.bound
    for expert, start, stop in zip(
        *(t[:count].tolist() for t in (tiles.expert, tiles.start, tiles.stop)), strict=True
    ):
        places = list(range(start, min(start + rows, stop)))
        assert bool((flat[tiles.order[places].long()] == expert).all())
        covered += places
    assert covered == list(range(heads * length * 6))


def weights_of(flat: int, width: int, inner: int) -> ExpertWeights:
    return ExpertWeights(
        draw(flat, width, inner, scale=width**-0.5),
        draw(flat, width, inner, scale=width**-0.5),
        draw(flat, inner, width, scale=inner**-0.5),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "width", "inner"), [(1, 64, 96), (150, 128, 64), (40, 256, 160)])
def test_routed_experts(length: int, width: int, inner: int, kind: str) -> None:
    x = draw(length, 4, width)[:, 1:]
    routes, weights = routes_of(length, 3, 16, kind), weights_of(3 * 16, width, inner)
    got = experts.routed_experts("triton", x, routes, weights)
    want = mh_moe.routed_experts(x, routes, weights)
    assert float((got.float() - want.float()).norm() / want.float().norm()) <= 2e-3
    per_token = (got.float() - want.float()).flatten(1).norm(dim=1) / want.float().flatten(1).norm(dim=1)
    assert float(per_token.max()) <= 5e-3


def test_every_route_is_written_and_nothing_beside_it() -> None:
    length, heads, num_experts, width = 43, 3, 16, 64
    x, routes = draw(length, heads, width), routes_of(length, heads, num_experts, "most experts empty")
    tiles = routing.sort_into_tiles(routes.experts, num_experts, experts._TILE_ROWS)
    num_routes = heads * length * 6
    whole = poison(num_routes + 200, width)
    experts.run_tiles(x, routes.weights, weights_of(heads * num_experts, width, 32), tiles, whole)
    assert bool(whole[:num_routes].isfinite().all())
    assert bool(whole[num_routes:].isnan().all())


def test_heads_in_passes_give_the_bits_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, routes, weights = draw(77, 3, 64), routes_of(77, 3, 16, "spread"), weights_of(48, 64, 64)
    whole = experts.routed_experts("triton", x, routes, weights)
    monkeypatch.setattr(experts, "_MAX_ROUTES", 77 * 6)
    assert torch.equal(experts.routed_experts("triton", x, routes, weights), whole)


@pytest.mark.parametrize(("length", "top_k"), [(1, 1), (17, 6), (32, 8)])
def test_slots_are_added_in_order_in_fp32(length: int, top_k: int) -> None:
    heads, width = 3, 64
    results, into = draw(heads * length * top_k, width), poison(length, heads + 1, width)
    experts.sum_slots(results, into[:, 1:], top_k)
    slots = results.view(heads, length, top_k, width).float()
    total: Tensor = slots[:, :, 0]
    for slot in range(1, top_k):
        total = total + slots[:, :, slot]
    assert torch.equal(into[:, 1:], total.transpose(0, 1).bfloat16())
    assert bool(into[:, 0].isnan().all())
