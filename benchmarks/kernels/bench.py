"""Times every kernel of `kernels.gpu` on one CUDA device beside its torch definition, and checks it first.

Shapes: one of four sequence-parallel ranks at 540p: 3 MoE heads x 115,800 tokens, 28,950 tokens for
per-token work. Random inputs; medians of CUDA events after warm-up, the launches queued beforehand; inputs
exceed the L2 cache, so that repeats read memory. A check is the relative L2 error against the torch
definition. Ceilings (8192^3 bf16 product, device copy) come from the same process.

Usage: python benchmarks/kernels/bench.py [--out FILE.json] [--plot FILE.svg] [--commit HASH] [--only NAME]
Exit code 1 if a check fails.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tree itself, installed or not

import torch
from torch import Tensor

from benchmarks.kernels import measure, roofline
from benchmarks.kernels.roofline import (
    ATTENTION_HEADS,
    EXPERT_WIDTH,
    HEAD_DIM,
    HEADS,
    MOE_HEADS,
    MOE_TOKENS,
    MOE_WIDTH,
    NUM_EXPERTS,
    SEGMENT,
    TOKENS,
    TOP_K,
    WIDTH,
)
from kernels import attention, dispatch, mh_moe, mhc, qk_norm_rope, rms_norm, swiglu7
from kernels.gpu import experts, experts_hopper, flash, pointwise, routing, streams
from kernels.mh_moe import ExpertWeights, Routes

PARTS = ("pointwise", "streams", "attention", "experts")
BF16_ERROR = 5e-3
CUDA = torch.device("cuda")


class Report:
    """Rows of the table."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(
        self, name: str, ms: float, *, error: float | None = None, limit: float = BF16_ERROR, **facts: object
    ) -> None:
        ok = error is None or error <= limit
        row = {"kernel": name, "ms": round(ms, 4), "ok": ok, **facts}
        if error is not None:
            row["error"] = float(f"{error:.2e}")
        self.rows.append(row)
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)

    def print_ratios(self) -> None:
        """Print how many times faster each kernel is than the torch definition beside it."""
        ms = {str(row["kernel"]): float(str(row["ms"])) for row in self.rows}
        pairs = {name: f"{name}, torch" for name in ms}
        pairs |= {name: "experts, torch" for name in ms if name.endswith("sort, tiles, sum")}
        for name, definition in pairs.items():
            if definition in ms:
                print(f"{name}: {ms[definition] / ms[name]:.1f} times as fast as torch")


median_ms = partial(measure.median_ms, device=CUDA)
TILES = {"triton": experts.run_tiles, "hopper": experts_hopper.run_tiles}


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    error = (got.float() - want.float()).norm() / want.float().norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def rate(report: Report, name: str, ms: float, num_bytes: float, ceiling: float, **facts: object) -> None:
    """Add a memory-bound kernel with the share of the measured copy bandwidth."""
    floor = num_bytes / ceiling * 1e3
    report.add(name, ms, floor_ms=round(floor, 3), x_floor=round(ms / floor, 2), **facts)


def ceilings(report: Report) -> tuple[float, float]:
    """Add the two ceilings; return TFLOP/s and bytes per second."""
    reached = measure.ceilings(CUDA)
    report.add(roofline.PRODUCT, reached.product_ms, tflops=round(reached.flops / 1e12))
    report.add(roofline.COPY, reached.copy_ms, tb_per_s=round(reached.bandwidth / 1e12, 2))
    return reached.flops / 1e12, reached.bandwidth


def bench_attention(report: Report, peak: float) -> None:
    """Time the attention of a rank, both branches, with its sink correction, against a few exact queries."""
    bounds, picked = [0, SEGMENT, 2 * SEGMENT], 64
    q, k, v = (draw(2 * SEGMENT, ATTENTION_HEADS, HEAD_DIM) for _ in range(3))
    sinks = draw(1, ATTENTION_HEADS, dtype=torch.float32)
    scale = HEAD_DIM**-0.5
    keys, queries = (x[:SEGMENT].float().transpose(0, 1) for x in (k, q))
    scores = torch.bmm(queries[:, :picked], keys.transpose(1, 2)) * scale
    with_sink = torch.cat([scores, sinks.T[:, None].expand(-1, picked, -1)], dim=-1).softmax(dim=-1)
    want = torch.bmm(with_sink[..., :-1], v[:SEGMENT].float().transpose(0, 1)).transpose(0, 1)
    work = roofline.WORK["attention, cudnn"].flop
    for name in ("cudnn", "flash2"):
        attend = partial(
            flash.cuda_attention,
            name,
            q,
            k,
            v,
            sinks,
            bounds=bounds,
            scale=scale,
            correct=dispatch.correct_sinks,
        )
        error = relative(attend()[:picked], want)
        ms = median_ms(attend, repeats=5)
        tflops = round(work / ms / 1e9)
        report.add(f"attention, {name}", ms, error=error, tflops=tflops, share=round(tflops / peak, 2))


def bench_experts(report: Report, peak: float) -> None:
    x = draw(MOE_TOKENS, MOE_HEADS, MOE_WIDTH)
    gate = draw(MOE_HEADS, NUM_EXPERTS, MOE_WIDTH, scale=MOE_WIDTH**-0.5, dtype=torch.float32)
    bias = draw(MOE_HEADS, NUM_EXPERTS, scale=0.05, dtype=torch.float32)
    settings = {"top_k": TOP_K, "route_norm": True, "route_scale": 4.9}
    routes = mh_moe.route(x, gate, bias, **settings)
    fast = routing.route(x, gate, bias, **settings)
    differ = float((routes.experts != fast.experts).any(dim=-1).float().mean())
    same = (routes.experts == fast.experts).all(dim=-1)
    error = relative(fast.weights[same], routes.weights[same])
    route_ms = median_ms(lambda: routing.route(x, gate, bias, **settings))
    report.add(
        "route",
        route_ms,
        error=error,
        limit=1e-5,
        tokens_that_differ=differ,
        gap=near_tie(x, gate, bias, routes, fast),
    )
    tiles = routing.sort_into_tiles(fast.experts, NUM_EXPERTS, 128)
    sorted_routes = mh_moe.sort_routes(fast.experts, NUM_EXPERTS)
    shift = torch.arange(MOE_HEADS, device=CUDA)[:, None] * (MOE_TOKENS * TOP_K)
    wrong = float((tiles.order != (sorted_routes.order + shift).flatten()).float().mean())
    sort_ms = median_ms(lambda: routing.sort_into_tiles(fast.experts, NUM_EXPERTS, 128))
    report.add("sort into tiles", sort_ms, error=wrong, limit=0.0, tiles=int(tiles.total))
    report.add(
        "route + sort, torch",
        median_ms(
            lambda: mh_moe.sort_routes(mh_moe.route(x, gate, bias, **settings).experts, NUM_EXPERTS),
            repeats=3,
        ),
    )
    flat = MOE_HEADS * NUM_EXPERTS
    weights = ExpertWeights(
        draw(flat, MOE_WIDTH, EXPERT_WIDTH, scale=MOE_WIDTH**-0.5),
        draw(flat, MOE_WIDTH, EXPERT_WIDTH, scale=MOE_WIDTH**-0.5),
        draw(flat, EXPERT_WIDTH, MOE_WIDTH, scale=EXPERT_WIDTH**-0.5),
    )
    work = 6 * MOE_HEADS * MOE_TOKENS * TOP_K * MOE_WIDTH * EXPERT_WIDTH
    want = mh_moe.routed_experts(x, routes, weights)
    torch_ms = median_ms(lambda: mh_moe.routed_experts(x, routes, weights), repeats=3)
    report.add("experts, torch", torch_ms, tflops=round(work / torch_ms / 1e9))
    results = x.new_full((MOE_HEADS * MOE_TOKENS * TOP_K, MOE_WIDTH), float("nan"))
    for name, run in TILES.items():
        out = experts.routed_experts(name, x, routes, weights)
        again = experts.routed_experts(name, x, routes, weights)
        tiles_ms = median_ms(lambda run=run: run(x, routes.weights, weights, tiles, results))
        whole_ms = median_ms(lambda name=name: experts.routed_experts(name, x, routes, weights))
        tflops = round(work / tiles_ms / 1e9)
        report.add(
            f"experts, {name}: tiles",
            tiles_ms,
            error=relative(out, want),
            tflops=tflops,
            share=round(tflops / peak, 2),
        )
        report.add(
            f"experts, {name}: sort, tiles, sum",
            whole_ms,
            tflops=round(work / whole_ms / 1e9),
            again=torch.equal(out, again),
        )
    sum_ms = median_ms(lambda: experts.sum_slots(results, out, TOP_K))
    report.add("sum of slots", sum_ms)


def near_tie(x: Tensor, gate: Tensor, bias: Tensor, routes: Routes, fast: Routes) -> float:
    """Return the largest gap in biased score, in fp64, between two choices that differ."""
    places = (routes.experts != fast.experts).nonzero()
    if not len(places):
        return 0.0
    head, token = places[:, 0], places[:, 1]
    rows = x[token, head].double()
    score = [
        torch.sigmoid((rows * gate[head, r.experts[tuple(places.T)]].double()).sum(1))
        + bias[head, r.experts[tuple(places.T)]]
        for r in (routes, fast)
    ]
    return float((score[0] - score[1]).abs().max())


def bench_streams(report: Report, bandwidth: float) -> None:
    s = draw(TOKENS, 4, WIDTH)
    small = [draw(*shape, scale=0.5, dtype=torch.float32) for shape in ((1,), (1,), (1,), (4,), (4,), (4, 4))]
    weights = mhc.MixingWeights(
        draw(4 * WIDTH, scale=0.2, dtype=torch.float32), draw(4 * WIDTH, 24, dtype=torch.float32), *small
    )
    want = mhc.Gates(*(t.contiguous() for t in mhc.gates(s, weights)))
    rate(report, "mhc gates, torch", median_ms(lambda: mhc.gates(s, weights), repeats=5), s.nbytes, bandwidth)
    x = torch.full((TOKENS, WIDTH), float("nan"), dtype=s.dtype, device=CUDA)
    streams.pre_mix(s, want.pre, x)
    error = relative(x, mhc.pre_mix(s, want.pre))
    pre_ms = median_ms(lambda: streams.pre_mix(s, want.pre, x))
    rate(report, "mhc pre_mix", pre_ms, s.nbytes + x.nbytes, bandwidth, error=error)
    rate(
        report,
        "mhc pre_mix, torch",
        median_ms(lambda: mhc.pre_mix(s, want.pre), repeats=5),
        s.nbytes + x.nbytes,
        bandwidth,
    )
    out = draw(TOKENS, WIDTH)
    wanted = mhc.post_mix(s, want, out)
    written = s.clone()
    streams.post_mix(written, want, out)
    error = relative(written, wanted)
    post_ms = median_ms(lambda: streams.post_mix(written, want, out))
    num_bytes = 2 * s.nbytes + out.nbytes
    rate(report, "mhc post_mix", post_ms, num_bytes, bandwidth, error=error)
    rate(
        report,
        "mhc post_mix, torch",
        median_ms(lambda: mhc.post_mix(s, want, out), repeats=5),
        num_bytes,
        bandwidth,
    )


def bench_pointwise(report: Report, bandwidth: float) -> None:
    x, weight = draw(TOKENS, WIDTH), draw(WIDTH, scale=0.2, dtype=torch.float32)
    error = relative(pointwise.rms_norm(x, weight), rms_norm.rms_norm(x, weight))
    rate(
        report,
        "rms_norm",
        median_ms(lambda: pointwise.rms_norm(x, weight)),
        2 * x.nbytes,
        bandwidth,
        error=error,
    )
    rate(
        report,
        "rms_norm, torch",
        median_ms(lambda: rms_norm.rms_norm(x, weight).to(x.dtype)),
        2 * x.nbytes,
        bandwidth,
    )
    qkv = draw(TOKENS, 3 * HEADS * HEAD_DIM)
    q = qkv[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
    weight, angle = draw(HEAD_DIM, scale=0.2, dtype=torch.float32), draw(TOKENS, 48, dtype=torch.float32)
    table = torch.cat([angle.sin(), angle.cos()], dim=1)
    into = torch.full(q.shape, float("nan"), dtype=q.dtype, device=CUDA)
    pointwise.norm_rope(q, weight, table, into)
    error = relative(into, qk_norm_rope.qk_norm_rope(q, weight, table))
    num_bytes = 2 * into.nbytes + table.nbytes
    rate(
        report,
        "q norm + rope",
        median_ms(lambda: pointwise.norm_rope(q, weight, table, into)),
        num_bytes,
        bandwidth,
        error=error,
    )
    rate(
        report,
        "q norm + rope, torch",
        median_ms(lambda: into.copy_(qk_norm_rope.qk_norm_rope(q, weight, table))),
        num_bytes,
        bandwidth,
    )
    both = draw(TOKENS, 2 * 5120, scale=3.0)
    error = relative(pointwise.swiglu7(both), swiglu7.swiglu7(both))
    rate(
        report,
        "swiglu7",
        median_ms(lambda: pointwise.swiglu7(both)),
        1.5 * both.nbytes,
        bandwidth,
        error=error,
    )
    rate(report, "swiglu7, torch", median_ms(lambda: swiglu7.swiglu7(both)), 1.5 * both.nbytes, bandwidth)
    plain, lse, sinks = into, draw(HEADS, TOKENS, dtype=torch.float32).T, draw(1, HEADS, dtype=torch.float32)
    fixed = torch.empty_like(plain)
    gate = draw(TOKENS, HEADS)
    rate(
        report,
        "sigmoid gate, torch",
        median_ms(lambda: plain * torch.sigmoid(gate)[..., None]),
        2 * plain.nbytes + gate.nbytes,
        bandwidth,
    )
    pointwise.sink_correction(plain, lse, sinks, fixed)
    error = relative(fixed, attention.sink_correction(plain, lse, sinks))
    num_bytes = 2 * plain.nbytes + lse.nbytes
    rate(
        report,
        "sink correction",
        median_ms(lambda: pointwise.sink_correction(plain, lse, sinks, fixed)),
        num_bytes,
        bandwidth,
        error=error,
    )
    rate(
        report,
        "sink correction, torch",
        median_ms(lambda: fixed.copy_(attention.sink_correction(plain, lse, sinks))),
        num_bytes,
        bandwidth,
    )


@torch.no_grad()
def main(words: list[str] | None = None) -> int:
    """Run what was asked for and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="where the roofline of this run is drawn, SVG")
    parser.add_argument("--commit", help="what is measured; by default what git says")
    parser.add_argument("--only", choices=PARTS, action="append")
    arguments = parser.parse_args(words)
    if CUDA.type == "cuda" and not torch.cuda.is_available():
        parser.error("the kernels need a CUDA device, and this machine has none")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    report = Report()
    peak, bandwidth = ceilings(report)
    parts = arguments.only or PARTS
    if "pointwise" in parts:
        bench_pointwise(report, bandwidth)
    if "streams" in parts:
        bench_streams(report, bandwidth)
    if "attention" in parts:
        bench_attention(report, peak)
    if "experts" in parts:
        bench_experts(report, peak)
    report.print_ratios()
    record = measure.stamp(CUDA, arguments.commit) | {"rows": report.rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        arguments.plot.write_text(roofline.draw(record), encoding="utf-8")
    failed = [row["kernel"] for row in report.rows if not row["ok"]]
    print(f"{len(report.rows)} rows, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
