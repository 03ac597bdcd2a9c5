"""Times one whole denoising step on one device: both branches, all layers, guidance and solver.

Sizes are the released ones, weights random. A few distinct resident layers of each kind (`--pool`) stand for
the 40, so that a step waits for no streaming and needs no 228 GB. The step is timed as it is (median); one
more is timed operation by operation, by CUDA events. Each operation has a floor: its FLOP at the rate of the
bf16 product, or its bytes at the rate of the copy, both measured in this process.

The projection for four sequence-parallel ranks adds up parts measured here at the sizes of one rank: all
tokens with a quarter of the heads, a quarter of the tokens for the rest. It is no measurement of four GPUs:
exchanges are left out, or counted in full at `--link-gb-per-s`.

Usage: python benchmarks/kernels/step.py [--tier 540p 272p] [--pool 4] [--out FILE.json] [--tiny --device cpu]
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tree itself, installed or not

import torch
from torch import Tensor

from benchmarks.gpu_check import fill
from benchmarks.kernels.measure import Ceilings, ceilings, median_ms, stamp, synchronize
from kernels import dispatch
from kernels.mh_moe import ExpertWeights
from magi2 import determinism, packing
from magi2.checkpoint.keys import build_on_meta
from magi2.config import ModelConfig, SamplingConfig
from magi2.contract import NUM_AUDIO_LATENTS, NUM_LATENT_FRAMES, TIERS
from magi2.model.adapters import PostAdapter, PreAdapter
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.layer import Layer
from magi2.model.linear import ModalityLinear
from magi2.model.tokens import Tokens
from magi2.model.transformer import Magi2Transformer
from magi2.packing import Run
from magi2.sampling import loop
from magi2.sampling.unipc import FlowUniPC

TEXT_LENGTHS = (2000, 450)
RANKS = 4
STEPS_OF_A_CLIP = 100
# Functions of the dispatcher, and what their time is called.
OPERATIONS = {
    "attend": "attention",
    "correct_sinks": "sink correction",
    "rms_norm": "rms norm",
    "norm_rope": "q/k norm and rotary",
    "activate": "swiglu7",
    "read_streams": "streams: gates, read",
    "write_streams": "streams: write",
    "route": "choice of experts",
    "routed_experts": "routed experts",
}
ATTENTION_PRODUCTS, DENSE_PRODUCTS = "attention products", "dense mlp products"
MOE_PRODUCTS = "split, merge, shared products"
ADAPTERS, SOLVER, REST = "adapters", "guidance and solver", "rest (sigmoid gates, copies, sums)"


@dataclass(frozen=True)
class Setting:
    """What the command line asked for."""

    device: torch.device
    is_tiny: bool
    pool: int
    repeats: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.tiny() if self.is_tiny else ModelConfig.released()


class Meter:
    """Exclusive time of every operation while it is installed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, str | None, Any, Any]] = []
        self._open: list[str] = []
        self._restore: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, label: str | Callable[..., str]) -> None:
        """Replace a function by one that is timed."""
        kept = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            own = label if isinstance(label, str) else label(*arguments)
            parent = self._open[-1] if self._open else None
            self._open.append(own)
            begin = self._now()
            result = kept(*arguments, **named)
            self._spans.append((own, parent, begin, self._now()))
            self._open.pop()
            return result

        self._restore.append((owner, name, kept))
        setattr(owner, name, timed)

    def remove(self) -> None:
        for owner, name, kept in reversed(self._restore):
            setattr(owner, name, kept)

    def milliseconds(self) -> dict[str, float]:
        """Return the time of each operation without that of those inside it."""
        synchronize(self._device)
        total: defaultdict[str, float] = defaultdict(float)
        for own, parent, begin, end in self._spans:
            ms = begin.elapsed_time(end) if self._device.type == "cuda" else 1e3 * (end - begin)
            total[own] += ms
            if parent is not None:
                total[parent] -= ms
        return dict(total)

    def calls(self) -> dict[str, int]:
        return dict(Counter(own for own, *_ in self._spans))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def metered(model: Magi2Transformer, device: torch.device) -> Iterator[Meter]:
    """Time every operation of the block's run."""
    labels = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ModalityLinear):
            is_moe = "shared" in name or name.endswith(("split_linear", "merge_linear"))
            kind = MOE_PRODUCTS if is_moe else DENSE_PRODUCTS
            labels[id(module)] = ATTENTION_PRODUCTS if ".attention." in name else kind
    meter = Meter(device)
    for name, label in OPERATIONS.items():
        meter.wrap(dispatch, name, label)
    meter.wrap(ModalityLinear, "forward", lambda module, *_: labels[id(module)])
    for adapter in (PreAdapter, PostAdapter):
        meter.wrap(adapter, "forward", ADAPTERS)
    meter.wrap(loop, "guide", SOLVER)
    meter.wrap(FlowUniPC, "step", SOLVER)
    try:
        yield meter
    finally:
        meter.remove()


def build(setting: Setting) -> Magi2Transformer:
    """Return the whole model, of whose layers only `pool` of each kind are distinct."""
    config = setting.model
    model = build_on_meta(config)
    layers = model.block.layers
    kept: defaultdict[tuple[bool, bool], list[Layer]] = defaultdict(list)
    seen: Counter[tuple[bool, bool]] = Counter()
    for index in range(config.num_layers):
        kind = (index in config.mm_layers, index in config.moe.layers)
        if len(kept[kind]) < setting.pool:
            kept[kind].append(layers[index])
        layers[index] = kept[kind][seen[kind] % len(kept[kind])]
        seen[kind] += 1
    fill(model, setting.device)
    return model


def inputs(setting: Setting, tier: str) -> tuple[Tensor, Tensor, packing.Conditioning]:
    """Return noise of a tier's size, video and audio, and text features."""
    config, size = setting.model, TIERS[tier]
    generator = torch.Generator(setting.device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.device)

    grid = (2, 2, 3) if setting.is_tiny else (NUM_LATENT_FRAMES, size.latent_height, size.latent_width)
    lengths = (8, 3) if setting.is_tiny else TEXT_LENGTHS
    positive, negative = (draw(1, length, config.text_in_channels).bfloat16() for length in lengths)
    audio = draw(1, 6 if setting.is_tiny else NUM_AUDIO_LATENTS, config.audio_in_channels)
    return draw(1, config.video_in_channels, *grid), audio, packing.Conditioning((positive, negative))


def time_steps(denoiser: TransformerDenoiser, noise: tuple[Tensor, Tensor], setting: Setting) -> list[float]:
    """Return the seconds of each step but the first, which packs and warms up."""
    ends: list[float] = []

    def on_step(_step: int, _total: int) -> None:
        synchronize(setting.device)
        ends.append(time.perf_counter())

    loop.denoise(denoiser, *noise, num_steps=setting.repeats + 1, sampling=SamplingConfig(), on_step=on_step)
    return [after - before for before, after in pairwise(ends)]


def floors(config: ModelConfig, tokens: Tokens, reached: Ceilings) -> dict[str, float]:
    """Return the least milliseconds of each operation of one step.

    Products by their FLOP, the rest by bytes: every input and output once.
    """
    length, width, moe = tokens.num_tokens, config.hidden_size, config.moe
    segments = [stop - start for start, stop in pairwise(tokens.segment_bounds)]
    num_moe = len(moe.layers)
    num_dense, halves = config.num_layers - num_moe, 2 * config.num_layers
    heads = (config.num_heads + 2 * config.num_query_groups) * config.head_dim
    routes = length * moe.num_heads * moe.top_k
    shared = 3 * (moe.shared_width + moe.modality_width)
    flop = {
        "attention": 4 * width * sum(n * n for n in segments) * config.num_layers,
        ATTENTION_PRODUCTS: 2 * length * width * (config.num_heads + heads + width) * config.num_layers,
        DENSE_PRODUCTS: 6 * length * width * config.dense_intermediate * num_dense,
        MOE_PRODUCTS: 2 * length * width * (2 * config.routed_width + shared) * num_moe,
        "routed experts": 6 * routes * config.moe_head_dim * moe.expert_width * num_moe,
    }
    one, streams = 2 * width, 2 * config.stream_width
    wide = num_moe * (moe.shared_width + moe.modality_width) + num_dense * config.dense_intermediate
    num_bytes = {
        "rms norm": halves * length * 2 * one,
        "q/k norm and rotary": config.num_layers * length * 4 * one,
        "sink correction": config.num_layers * length * 2 * one,
        "swiglu7": length * 6 * wide,
        "streams: gates, read": halves * length * (streams + one),
        "streams: write": halves * length * (2 * streams + one),
        "choice of experts": num_moe * (length * 2 * config.routed_width + 12 * routes),
    }
    by_flop = {name: 1e3 * work / reached.flops for name, work in flop.items()}
    return by_flop | {name: 1e3 * work / reached.bandwidth for name, work in num_bytes.items()}


def clipped(tokens: Tokens, length: int) -> Tokens:
    """Return the first rows as one rank of several has them."""
    blocks = tuple(Run(b.start, min(b.stop, length), b.modality) for b in tokens.blocks if b.start < length)
    return Tokens(blocks, tokens.segment_bounds, tokens.rope[:length], (length,), (length,))


def rank_parts(model: Magi2Transformer, tokens: Tokens, setting: Setting) -> dict[str, float]:
    """Return milliseconds of the parts of a layer at the sizes of one of four sequence-parallel ranks."""
    config, device = setting.model, setting.device
    length = -(-tokens.num_tokens // RANKS)
    own = clipped(tokens, length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=model.dtype)

    def median(work: Callable[[], object]) -> float:
        return median_ms(work, device, repeats=3, warm=1)

    parts = {"attention": median(attention_of_a_rank(config, tokens, draw))}
    streams = draw(length, config.mhc.num_streams, config.hidden_size)
    core = draw(length, config.num_heads, config.head_dim)
    routed = draw(length, config.moe.num_heads, config.moe_head_dim)
    for kind, index in kinds(config).items():
        layer = model.block.layers[index]

        def per_token(layer: Layer = layer, *, is_moe: bool = index in config.moe.layers) -> None:
            reading = layer.read(streams, "attn", own)
            gate = layer.attention.project(reading.x, own).gate
            layer.write(streams, reading.gates, layer.attention.finish(core, gate, own), own)
            reading = layer.read(streams, "mlp", own)
            out = (
                layer.mlp.finish(layer.mlp.begin(reading.x, own).out, routed, own)
                if is_moe
                else layer.mlp(reading.x, own)
            )
            layer.end(streams, reading, out, own)

        parts[f"{kind}: per-token work"] = median(per_token)
    parts["routed experts with choice"] = median(experts_of_a_rank(model, tokens.num_tokens, draw))
    return parts


def kinds(config: ModelConfig) -> dict[str, int]:
    """Return one layer of each of the two kinds of MLP."""
    dense = next(index for index in range(config.num_layers) if index not in config.moe.layers)
    return {"dense layer": dense, "moe layer": config.moe.layers[0]}


def attention_of_a_rank(
    config: ModelConfig, tokens: Tokens, draw: Callable[..., Tensor]
) -> Callable[[], object]:
    """Return the work of a quarter of the attention heads on all tokens."""
    heads = max(1, config.num_heads // RANKS)
    q, k, v = (draw(tokens.num_tokens, heads, config.head_dim) for _ in range(3))
    sinks = torch.zeros(config.sink_token_num, heads, device=q.device)
    bounds, softcap = tokens.segment_bounds, config.attn_softcap
    return lambda: dispatch.attend(q, k, v, sinks, bounds=bounds, softcap=softcap)


def experts_of_a_rank(
    model: Magi2Transformer, length: int, draw: Callable[..., Tensor]
) -> Callable[[], object]:
    """Return the work of a quarter of the MoE heads on all tokens."""
    config = model.config
    experts = model.block.layers[config.moe.layers[0]].mlp.moe_mlp
    heads = max(1, config.moe.num_heads // RANKS)
    flat = slice(0, heads * config.moe.num_experts)
    x = draw(length, heads, config.moe_head_dim)
    gate = experts.gate[flat].view(heads, -1, config.moe_head_dim)
    bias = experts.router.expert_bias[flat].view(heads, -1)
    weights = ExpertWeights(experts.W_gate[flat], experts.W_up[flat], experts.W_down[flat])
    settings = {
        "top_k": config.moe.top_k,
        "route_norm": config.moe.route_norm,
        "route_scale": config.moe.route_scale,
    }
    return lambda: dispatch.routed_experts(x, dispatch.route(x, gate, bias, **settings), weights)


def project(
    config: ModelConfig, length: int, parts: dict[str, float], whole: dict[str, float], rate: float | None
) -> dict[str, object]:
    """Return what four ranks would take if nothing but these parts took time."""
    num_moe = len(config.moe.layers)
    num_dense = config.num_layers - num_moe
    moe_ms = parts["moe layer: per-token work"] + parts["attention"] + parts["routed experts with choice"]
    dense_ms = parts["dense layer: per-token work"] + parts["attention"]
    beside_ms = whole.get(ADAPTERS, 0.0) + whole.get(SOLVER, 0.0)  # not divided: the worst case
    attention_width = (2 * config.num_heads + 2 * config.num_query_groups) * config.head_dim
    per_token = config.num_layers * attention_width + num_moe * 2 * config.routed_width
    exchanged = 2 * (length / RANKS) * per_token * (RANKS - 1) / RANKS
    step_s = (num_moe * moe_ms + num_dense * dense_ms + beside_ms) / 1e3
    if rate is not None:
        step_s += exchanged / (rate * 1e9)
    return {
        "label": "projection from parts measured on one device, not a measurement of four",
        "ranks": RANKS,
        "parts_ms": {name: round(ms, 3) for name, ms in parts.items()},
        "moe_layer_ms": round(moe_ms, 2),
        "dense_layer_ms": round(dense_ms, 2),
        "exchanged_gb_a_step": round(exchanged / 1e9, 2),
        "exchanges": "left out" if rate is None else f"in full at {rate} GB/s",
        "step_s": round(step_s, 3),
        f"clip_of_{STEPS_OF_A_CLIP}_steps_s": round(step_s * STEPS_OF_A_CLIP, 1),
    }


@torch.no_grad()
def measure(setting: Setting, tier: str, reached: Ceilings, rate: float | None) -> dict[str, object]:
    """Measure one tier and print its tables."""
    model = build(setting)
    video, audio, conditioning = inputs(setting, tier)
    denoiser = TransformerDenoiser(model, conditioning)
    dispatch.clear_report()
    seconds = sorted(time_steps(denoiser, (video, audio), setting))[setting.repeats // 2]
    with metered(model, setting.device) as meter:
        synchronize(setting.device)
        began = time.perf_counter()
        loop.denoise(denoiser, video, audio, num_steps=1, sampling=SamplingConfig())
        synchronize(setting.device)
        metered_s = time.perf_counter() - began
    whole, calls = meter.milliseconds(), meter.calls()
    whole[REST] = max(0.0, 1e3 * metered_s - sum(whole.values()))
    tokens = model.prepare(packing.pack(video, audio, conditioning)).tokens
    least = floors(setting.model, tokens, reached)
    print(f"\n{tier}: {tokens.num_tokens} tokens, {seconds:.3f} s a step ({metered_s:.3f} s while metered)")
    rows = []
    for name, ms in sorted(whole.items(), key=lambda item: -item[1]):
        floor = least.get(name)
        row = {"operation": name, "ms": round(ms, 3), "of_step": round(ms / (1e3 * metered_s), 4)}
        row |= {"calls": calls.get(name, 0)}
        if floor is not None and name in calls:
            row |= {"floor_ms": round(floor, 3), "of_floor": round(floor / max(ms, 1e-9), 3)}
        rows.append(row)
        print("  " + "  ".join(f"{key}={value}" for key, value in row.items()))
    floor_s = sum(least[name] for name in least if name in calls) / 1e3
    projection = project(setting.model, tokens.num_tokens, rank_parts(model, tokens, setting), whole, rate)
    print(f"  floor {floor_s:.3f} s, {100 * floor_s / seconds:.0f} % of the step")
    print("  " + "  ".join(f"{key}={value}" for key, value in projection.items()))
    return {
        "tier": tier,
        "tokens": tokens.num_tokens,
        "step_s": round(seconds, 4),
        "metered_step_s": round(metered_s, 4),
        "floor_s": round(floor_s, 4),
        "floor_share": round(floor_s / seconds, 4),
        "ran": dispatch.report(),
        "operations": rows,
        "projection": projection,
    }


def main(words: list[str] | None = None) -> int:
    """Measure the tiers that were asked for and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what is measured; by default what git says")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tier", nargs="+", choices=list(TIERS), default=["540p", "272p"])
    parser.add_argument("--pool", type=int, default=4, help="distinct layers of each kind")
    parser.add_argument("--repeats", type=int, default=3, help="steps of which the median is taken")
    parser.add_argument("--link-gb-per-s", type=float, help="of one rank, counts exchanges in the projection")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for trying the script")
    arguments = parser.parse_args(words)
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("the released sizes need a CUDA device; --tiny runs on a CPU")
    determinism.configure(deterministic=False)
    device = torch.device(arguments.device)
    setting = Setting(device, arguments.tiny, arguments.pool, arguments.repeats)
    reached = ceilings(device, is_tiny=setting.is_tiny)
    print(f"product {reached.flops / 1e12:.0f} TFLOP/s, copy {reached.bandwidth / 1e12:.2f} TB/s")
    record = stamp(device, arguments.commit) | {
        "is_tiny": setting.is_tiny,
        "tflops": round(reached.flops / 1e12, 3),
        "tb_per_s": round(reached.bandwidth / 1e12, 4),
        "tiers": [measure(setting, tier, reached, arguments.link_gb_per_s) for tier in arguments.tier],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
