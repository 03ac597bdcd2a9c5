"""Every fused kernel against its torch definition, at odd sizes, into poisoned memory, twice."""

import pytest
import torch
from torch import Tensor

from kernels import attention, mh_moe, mhc, qk_norm_rope, rms_norm, swiglu7
from kernels.gpu import experts, pointwise, routing, streams
from kernels.mh_moe import ExpertWeights, Routes

# One bf16 rounding of equal fp32 values is 2**-9 at most and 1.7e-3 in the mean square.
ROUNDED = 2e-3
LENGTHS = [1, 63, 64, 777, 5000]
SETTINGS = {"top_k": 6, "route_norm": True, "route_scale": 4.9}


@pytest.fixture(autouse=True)
def _true_fp32(device: torch.device) -> None:
    assert device.type == "cuda"
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def fp32(*shape: int, scale: float = 1.0) -> Tensor:
    return draw(*shape, scale=scale, dtype=torch.float32)


def poison(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [8, 300, 3072])
def test_rms_norm(length: int, width: int) -> None:
    x, weight = draw(length, width + 8)[:, :width], fp32(width, scale=0.2)
    assert relative(pointwise.rms_norm(x, weight), rms_norm.rms_norm(x, weight)) <= ROUNDED


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "width", "pairs"), [(1, 16, 6), (3, 64, 24), (24, 128, 48)])
def test_norm_rope(length: int, heads: int, width: int, pairs: int) -> None:
    x = draw(length, 2 * heads * width)[:, heads * width :].unflatten(1, (heads, width))
    weight, table, into = fp32(width, scale=0.2), fp32(length, 2 * pairs), poison(length, heads, width)
    pointwise.norm_rope(x, weight, table, into)
    assert relative(into, qk_norm_rope.qk_norm_rope(x, weight, table)) <= ROUNDED


@pytest.mark.parametrize("shape", [(1, 2), (33, 300), (777, 5120)])
def test_swiglu7(shape: tuple[int, int]) -> None:
    x = draw(*shape, scale=5.0)
    assert relative(pointwise.swiglu7(x), swiglu7.swiglu7(x)) <= ROUNDED


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", [1, 6, 24])
def test_sink_correction_of_any_layout_in_place_too(length: int, heads: int) -> None:
    plain = draw(heads, length, 128).transpose(0, 1)
    lse, sinks, into = fp32(heads, length).T, fp32(2, heads), poison(length, heads, 128)
    lse[: length // 2] = -torch.inf  # rows that saw no key
    want = attention.sink_correction(plain, lse, sinks)
    pointwise.sink_correction(plain, lse, sinks, into)
    assert relative(into, want) <= ROUNDED
    pointwise.sink_correction(plain, lse, sinks, plain)
    assert torch.equal(plain, into)


def mixing_weights(width: int) -> mhc.MixingWeights:
    small = [fp32(*shape, scale=0.5) for shape in ((1,), (1,), (1,), (4,), (4,), (4, 4))]
    return mhc.MixingWeights(fp32(4 * width, scale=0.2), fp32(4 * width, 24), *small)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [64, 704, 3072])
def test_streams(length: int, width: int) -> None:
    s, out, weights = draw(length, 4, width), draw(length, width), mixing_weights(width)
    want = mhc.Gates(*(g.contiguous() for g in mhc.gates(s, weights)))
    x = poison(length, width)
    streams.pre_mix(s, want.pre, x)
    assert relative(x, mhc.pre_mix(s, want.pre)) <= ROUNDED
    after = mhc.post_mix(s, want, out)
    streams.post_mix(s, want, out)
    assert relative(s, after) <= ROUNDED


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "num_experts", "width"), [(1, 8, 64), (2, 32, 128), (3, 256, 256)])
def test_route_chooses_as_the_definition_but_at_near_ties(
    length: int, heads: int, num_experts: int, width: int
) -> None:
    x, gate = draw(length, heads, width), fp32(heads, num_experts, width, scale=width**-0.5)
    bias = fp32(heads, num_experts, scale=0.05)
    got, again = (routing.route(x, gate, bias, **SETTINGS) for _ in range(2))
    want = mh_moe.route(x, gate, bias, **SETTINGS)
    assert torch.equal(got.experts, again.experts)
    assert torch.equal(got.weights, again.weights)
    exact = torch.einsum("lgd,ged->gle", x.double(), gate.double()).sigmoid() + bias[:, None]
    gap = exact.gather(2, got.experts) - exact.gather(2, want.experts)
    assert float(gap.abs().max()) <= 1e-6
    same = (got.experts == want.experts).all(dim=-1)
    torch.testing.assert_close(got.weights[same], want.weights[same], rtol=1e-5, atol=1e-6)
    assert float(same.float().mean()) >= 0.999


def test_ties_go_to_the_lowest_expert() -> None:
    x, gate = draw(500, 2, 256), torch.zeros(2, 256, 256, device="cuda")
    routes = routing.route(x, gate, torch.zeros(2, 256, device="cuda"), **SETTINGS)
    assert torch.equal(routes.experts, torch.arange(6, device="cuda").expand_as(routes.experts))


def crowded(length: int, heads: int, num_experts: int, kind: str) -> Routes:
    """Return routes that leave experts empty, or send every token to the same ones."""
    if kind == "all to the same":
        experts = torch.arange(6, device="cuda").expand(heads, length, 6).contiguous() + num_experts - 6
    else:
        count = num_experts if kind == "spread" else 8
        experts = torch.rand(heads, length, count, device="cuda").argsort(dim=-1)[..., :6].contiguous()
    return Routes(experts, torch.rand(experts.shape, device="cuda"))


@pytest.mark.parametrize("kind", ["spread", "most experts empty", "all to the same"])
@pytest.mark.parametrize("length", LENGTHS)
def test_sort_is_stable_and_tiles_cover_every_route_once(length: int, kind: str) -> None:
    routes = crowded(length, 3, 256, kind)
    tiles = routing.sort_into_tiles(routes.experts, 256, 128)
    own = mh_moe.sort_routes(routes.experts, 256)
    shift = torch.arange(3, device="cuda")[:, None] * (length * 6)
    assert torch.equal(tiles.order, (own.order + shift).flatten().int())
    count = int(tiles.total)
    flat = (routes.experts + 256 * torch.arange(3, device="cuda")[:, None, None]).flatten()
    covered = []
    for expert, start, stop in zip(
        *(t[:count].tolist() for t in (tiles.expert, tiles.start, tiles.stop)), strict=True
    ):
        places = list(range(start, min(start + 128, stop)))
        assert bool((flat[tiles.order[places].long()] == expert).all())
        covered += places
    assert covered == list(range(3 * length * 6))


def expert_weights(flat: int, width: int, inner: int) -> ExpertWeights:
    return ExpertWeights(
        draw(flat, width, inner, scale=width**-0.5),
        draw(flat, width, inner, scale=width**-0.5),
        draw(flat, inner, width, scale=inner**-0.5),
    )


@pytest.mark.parametrize("kind", ["spread", "most experts empty", "all to the same"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("name", "width", "inner"),
    [("hopper", 256, 1280), ("hopper", 256, 64), ("triton", 256, 1280), ("triton", 64, 96)],
)
def test_routed_experts(name: str, width: int, inner: int, length: int, kind: str) -> None:
    x = draw(length, 4, width)[:, 1:]  # the heads of a rank are a view
    routes, weights = crowded(length, 3, 16, kind), expert_weights(3 * 16, width, inner)
    want = mh_moe.routed_experts(x, routes, weights)
    got, again = (experts.routed_experts(name, x, routes, weights) for _ in range(2))
    assert torch.equal(got, again)
    assert relative(got, want) <= 1e-3
    per_token = (got.float() - want.float()).flatten(1).norm(dim=1) / want.float().flatten(1).norm(dim=1)
    assert float(per_token.max()) <= 5e-3


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_heads_in_passes_give_the_bits_of_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, routes, weights = draw(777, 3, 256), crowded(777, 3, 16, "spread"), expert_weights(48, 256, 128)
    whole = experts.routed_experts(name, x, routes, weights)
    monkeypatch.setattr(experts, "_MAX_ROUTES", 777 * 6)
    assert torch.equal(experts.routed_experts(name, x, routes, weights), whole)


def test_offsets_beyond_two_to_the_31() -> None:
    length, width, tail = 180_000, 3072, slice(-77, None)
    s = torch.randn(77, 4, width, device="cuda").bfloat16().repeat(length // 77 + 1, 1, 1)[:length]
    out, weights = draw(length, width), mixing_weights(width)
    assert s.numel() > 2**31
    want = mhc.gates(s[tail], weights)
    # The tail repeats the first 77 tokens, and so does every stretch before it.
    gates = mhc.Gates(
        *(
            g.repeat(length // 77 + 1, *([1] * (g.ndim - 1)))[:length].contiguous()
            for g in mhc.gates(s[:77], weights)
        )
    )
    x = poison(length, width)
    streams.pre_mix(s, gates.pre, x)
    assert relative(x[tail], mhc.pre_mix(s[tail], want.pre)) <= ROUNDED
    after = mhc.post_mix(s[tail], mhc.Gates(*(g[tail] for g in gates)), out[tail])
    streams.post_mix(s, gates, out)
    assert relative(s[tail], after) <= ROUNDED
    rows, weight = s.view(length, 4 * width), fp32(4 * width, scale=0.2)
    assert relative(pointwise.rms_norm(rows, weight)[tail], rms_norm.rms_norm(rows[tail], weight)) <= ROUNDED
    assert relative(pointwise.swiglu7(rows)[tail], swiglu7.swiglu7(rows[tail])) <= ROUNDED
