"""One run that shows on one GPU that the engine computes what it should, how fast, and in how much memory.

Three parts, each usable alone by `--only`:
- renders: the whole pipeline on the tiny checkpoint in bf16, text and image, 272p and 540p; every file is
  probed, every request is rendered twice and must give equal frames and samples.
- strict: the same with deterministic algorithms enforced, in a process of its own.
- layers: one dense layer with weights per modality and one MoE layer at released size and 540p token
  counts, random weights, each half against an fp32 oracle on sampled rows: the same code in fp32 with the
  same bf16-rounded weights and inputs. Two things differ: attention is a plain softmax with a sink column,
  and the oracle's MoE is given the routes of the bf16 run, since near scores change places in rounding.

Usage: python benchmarks/gpu_check.py --out DIR [--device cuda] [--tiny] [--only PART ...]
`--tiny` runs everything at small sizes, also on a CPU. Exit code 1 if a check fails. Writes
`gpu_check.json` and a contact sheet of frames for each render into DIR.
"""

import argparse
import hashlib
import io
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tree itself, installed or not

import torch
from PIL import Image
from torch import Tensor

from kernels import dispatch
from magi2 import determinism, packing
from magi2.checkpoint.keys import build_on_meta
from magi2.checkpoint.tiny import write_tiny_checkpoint
from magi2.config import EngineConfig, ModelConfig
from magi2.contract import NUM_AUDIO_LATENTS, NUM_LATENT_FRAMES, TIERS, GenerationRequest, Tier
from magi2.media.clip import Clip
from magi2.media.mp4 import write_mp4
from magi2.media.probe import breaches, probe
from magi2.model.layer import Layer
from magi2.model.tokens import Tokens, cut
from magi2.pipeline import Magi2Pipeline, Rendered

PARTS = ("renders", "strict", "layers")
# As in `docs/parity.md`: one bf16 module against fp32 from the same inputs.
RELATIVE_L2 = 1e-2
NUM_SAMPLED = 192
TEXT_LENGTHS = (2000, 450)
PROMPT = "A tea seller pours one cup while the morning market opens behind her."


@dataclass(frozen=True)
class Setting:
    """What the command line asked for."""

    out: Path
    device: torch.device
    is_tiny: bool

    @property
    def num_steps(self) -> int:
        return 1 if self.is_tiny else 4


class Checks:
    """Rows of the table, and whether each holds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, name: str, *, ok: bool, **facts: object) -> None:
        self.rows.append({"check": name, "ok": bool(ok), **facts})
        shown = "  ".join(f"{key}={value}" for key, value in facts.items())
        print(f"{'ok  ' if ok else 'FAIL'}  {name:<34} {shown}", flush=True)


# ---- renders


def picture() -> bytes:
    """Return a PNG with colours, edges and a round thing."""
    x = torch.linspace(0, 255, 640).expand(480, 640)
    y = torch.linspace(0, 255, 480)[:, None].expand(480, 640)
    disc = ((x - 127).square() + (y - 127).square() < 60**2) * 160
    pixels = torch.stack([x, y, 255 - x + disc], dim=-1).clamp(0, 255).to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def digest(clip: Clip) -> str:
    """Digest frames and samples."""
    return hashlib.sha256(clip.frames.numpy().tobytes() + clip.samples.numpy().tobytes()).hexdigest()[:16]


def sheet(clip: Clip) -> Image.Image:
    """Return six frames of a clip on one sheet."""
    frames = clip.frames[[0, 2, 4, 40, 80, 124]]
    rows = [torch.cat(list(frames[k : k + 3]), dim=1) for k in (0, 3)]
    return Image.fromarray(torch.cat(rows).numpy())


def check_clip(checks: Checks, setting: Setting, name: str, rendered: Rendered) -> None:
    """Write, probe and judge one clip, and record its times."""
    clip, stats = rendered.clip, rendered.stats
    begin = time.monotonic()
    path = setting.out / f"{name}.mp4"
    write_mp4(path, clip, preset="fast")
    found = breaches(probe(path), clip.width, clip.height)
    frames = clip.frames.float()
    checks.add(
        name,
        ok=not found and frames.std() > 5 and bool(0.005 < clip.samples.square().mean().sqrt() < 1),
        breaches=found,
        digest=digest(clip),
        pixel_std=round(float(frames.std()), 1),
        seconds={k: round(v, 3) for k, v in stats.stage_durations.items()}
        | {"mux": round(time.monotonic() - begin, 3)},
        peak_mib=None if stats.peak_memory_mb is None else round(stats.peak_memory_mb),
        tokens=stats.conditioning["branches"],
    )
    sheet(clip).save(setting.out / f"{name}.png")
    path.unlink()


def run_renders(checks: Checks, setting: Setting, root: Path) -> None:
    """Render text and image at both tiers, and one request twice."""
    pipeline = Magi2Pipeline(EngineConfig(root, device=str(setting.device)))
    checks.add("fingerprint", ok=True, **pipeline.fingerprint())
    for tier in TIERS:
        for kind, image in (("t2va", None), ("i2va", picture())):
            request = GenerationRequest(PROMPT, tier, setting.num_steps, 5, has_image=image is not None)
            rendered = pipeline(request, image=image)
            check_clip(checks, setting, f"{kind}-{tier}", rendered)
            again = digest(pipeline(request, image=image).clip)
            checks.add(
                f"{kind}-{tier} again",
                ok=again == digest(rendered.clip),
                digest=again,
            )
    weights = [p.device.type for p in pipeline.text_encoder.module.parameters()]
    checks.add("text encoder is back on the host", ok=set(weights) == {"cpu"})
    checks.add("kernels that ran", ok=True, **{k: ",".join(v) for k, v in dispatch.report().items()})
    pipeline.close()


def run_strict(checks: Checks, setting: Setting, root: Path) -> None:
    """Render one request twice with deterministic algorithms enforced."""
    pipeline = Magi2Pipeline(EngineConfig(root, device=str(setting.device), deterministic=True))
    request = GenerationRequest(PROMPT, "272p", setting.num_steps, 5, deterministic=True, has_image=True)
    clips = [pipeline(request, image=picture()).clip for _ in range(2)]
    checks.add("strict i2va-272p, twice", ok=digest(clips[0]) == digest(clips[1]), digest=digest(clips[0]))
    pipeline.close()


# ---- layers


def two_layers(*, is_tiny: bool) -> ModelConfig:
    """Return the released model cut to a dense layer with three weight sets (0) and an MoE layer (1)."""
    whole = ModelConfig.tiny() if is_tiny else ModelConfig.released()
    return replace(whole, num_layers=2, mm_layers=(0,), moe=replace(whole.moe, layers=(1,)))


@torch.no_grad()
def fill(model: torch.nn.Module, device: torch.device) -> None:
    """Give a model built on meta random weights that keep the size of what passes through them."""
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.normal_(generator=generator)
        if name.endswith("bands"):
            tensor.copy_(10_000.0 ** (-torch.arange(len(tensor)) / len(tensor)))
        elif "norm" in name or "alpha" in name or "bias" in name or name.endswith("sinks"):
            tensor.mul_(0.2)
        elif "phi" not in name:
            tensor.mul_(tensor.shape[1] ** -0.5)
        if "bias_res" in name:
            tensor.add_(2 * torch.eye(tensor.shape[0], device=device))


def packed_batch(config: ModelConfig, setting: Setting) -> packing.PackedBatch:
    """Pack two branches of the longest kind: 540p, text lengths of `dit.md`'s counts."""
    tier = TIERS["540p"]
    generator = torch.Generator(setting.device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.device)

    grid = (NUM_LATENT_FRAMES, tier.latent_height, tier.latent_width)
    lengths = (20, 9) if setting.is_tiny else TEXT_LENGTHS
    texts = tuple(draw(1, length, config.text_in_channels).bfloat16() for length in lengths)
    video = draw(1, config.video_in_channels, *grid)
    audio = draw(1, NUM_AUDIO_LATENTS, config.audio_in_channels)
    return packing.pack(video, audio, packing.Conditioning((texts[0], texts[1])))


def sampled_rows(tokens: Tokens, batch: packing.PackedBatch) -> Tensor:
    """Choose rows of every part of both branches, in packed order."""
    generator = torch.Generator().manual_seed(2)
    share = NUM_SAMPLED // len(batch.parts)
    picks = [
        part.start + torch.randperm(part.length, generator=generator)[: min(share, part.length)]
        for part in batch.parts
    ]
    return torch.cat(picks).sort().values.to(tokens.rope.device)


def only(tokens: Tokens, batch: packing.PackedBatch, rows: Tensor) -> Tokens:
    """Return the tokens of some rows, as one that needs no attention sees them."""
    modality = batch.modality[rows].tolist()
    runs = packing.merge_runs(packing.Run(k, k + 1, m) for k, m in enumerate(modality))
    blocks = tuple(cut(runs, 1, rows.device))
    return replace(tokens, blocks=blocks, segment_bounds=(0, len(rows)), rope=tokens.rope[rows])


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def plain_attention(layer: Layer, x: Tensor, tokens: Tokens, rows: Tensor) -> Tensor:
    """Return the gated attention of sampled rows: softmax over all keys of the segment and the sinks."""
    projected = layer.attention.project(x, tokens)
    sinks = layer.attention.sinks.T.float()
    scale = projected.q.shape[2] ** -0.5
    core = torch.empty_like(projected.q[rows])
    bounds = torch.tensor(tokens.segment_bounds, device=rows.device)
    segment_of = torch.bucketize(rows, bounds, right=True) - 1
    for segment in segment_of.unique().tolist():
        own = segment_of == segment
        keys = slice(int(bounds[segment]), int(bounds[segment + 1]))
        picked = (projected.q[rows[own]], projected.k[keys], projected.v[keys])
        q, k, v = (part.transpose(0, 1) for part in picked)
        scores = torch.bmm(q, k.transpose(1, 2)) * scale
        sink = sinks[:, None].expand(-1, scores.shape[1], -1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., : scores.shape[2]]
        core[own] = torch.bmm(weights, v).transpose(0, 1)
    gated = core * torch.sigmoid(projected.gate[rows])[..., None]
    return gated.flatten(1)


def check_layer(checks: Checks, setting: Setting, name: str, pair: tuple, packed: tuple) -> None:
    """Time a whole layer in bf16, then compare both halves of it with the fp32 oracle."""
    layer, exact = pair
    tokens, batch = packed
    device, config_width = setting.device, layer.attention.width
    generator = torch.Generator(device).manual_seed(3)
    shape = (tokens.num_tokens, 4, config_width)
    streams = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    run, peak, times = time_layer(layer, streams, tokens, device)
    facts = {"ms": {k: round(v, 1) for k, v in times.items()}, "peak_gib": peak, "L": tokens.num_tokens}
    checks.add(f"{name}: finite", ok=bool(torch.isfinite(run).all()), **facts)
    del run

    rows = sampled_rows(tokens, batch)
    own = only(tokens, batch, rows)
    reading = layer.read(streams, "attn", tokens)
    exact_reading = exact.read(streams.float(), "attn", tokens)
    compare(checks, f"{name}: stream gates and input", reading.x[rows], exact_reading.x[rows])
    x = reading.x
    del exact_reading, reading
    found = layer.attention(x, tokens)[rows]
    gated = plain_attention(exact, x.float(), tokens, rows)
    wanted = torch.cat(
        [exact.attention.linear_proj(gated[start:stop], modality) for start, stop, modality in own.blocks]
    )
    compare(checks, f"{name}: attention half", found, wanted)
    del gated, wanted

    found = layer.mlp(x, tokens)[rows]
    if hasattr(layer.mlp, "moe_mlp"):
        share_routes(layer, exact, x, tokens, rows)
    compare(checks, f"{name}: mlp half", found, exact.mlp(x[rows].float(), own))


def share_routes(layer: Layer, exact: Layer, x: Tensor, tokens: Tokens, rows: Tensor) -> None:
    """Give the oracle the routes that the bf16 run took for the sampled rows."""
    mlp, seen = layer.mlp, []
    chosen_by = mlp.moe_mlp.route

    def remember(heads: Tensor) -> object:
        seen.append(chosen_by(heads))
        return seen[-1]

    mlp.moe_mlp.route = remember
    mlp(x, tokens)
    del mlp.moe_mlp.route
    routes = seen[0]
    exact.mlp.moe_mlp.route = lambda _x: type(routes)(routes.experts[:, rows], routes.weights[:, rows])


def compare(checks: Checks, name: str, found: Tensor, wanted: Tensor) -> None:
    """Add the check that two tensors agree."""
    error = relative_l2(found, wanted)
    tokens = (found.float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
    checks.add(name, ok=error <= RELATIVE_L2, relative_l2=f"{error:.2e}", worst_token=f"{tokens.max():.2e}")


def time_layer(
    layer: Layer, streams: Tensor, tokens: Tokens, device: torch.device
) -> tuple[Tensor, float | None, dict[str, float]]:
    """Run a whole layer, then its halves; return the last state, peak GiB and median milliseconds."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    state = streams.clone()
    times = {"layer": median_ms(lambda: layer(state.copy_(streams), tokens), device)}
    peak = round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if is_cuda else None
    x = layer.read(streams, "attn", tokens).x
    times["read"] = median_ms(lambda: layer.read(streams, "attn", tokens), device)
    times["attention"] = median_ms(lambda: layer.attention(x, tokens), device)
    times["mlp"] = median_ms(lambda: layer.mlp(x, tokens), device)
    return state, peak, times


def median_ms(work, device: torch.device, repeats: int = 3) -> float:
    """Return the median time of a piece of work after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.monotonic()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.monotonic() - begin))
    return sorted(times[1:])[repeats // 2]


@torch.no_grad()
def run_layers(checks: Checks, setting: Setting) -> None:
    """Check one layer of each kind at released size."""
    determinism.configure(deterministic=False)
    config = two_layers(is_tiny=setting.is_tiny)
    model = build_on_meta(config)
    fill(model, setting.device)
    batch = packed_batch(config, setting)
    tokens = model.prepare(batch).tokens
    for index, name in ((0, "modality layer"), (1, "moe layer")):
        layer = model.block.layers[index]
        with torch.device("meta"):
            exact = Layer(config.with_dtype("float32"), index, torch.float32)
        exact.to_empty(device=setting.device)
        for target, source in zip(exact.state_dict().values(), layer.state_dict().values(), strict=True):
            target.copy_(source)
        check_layer(checks, setting, name, (layer, exact), (tokens, batch))
        del exact
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


# ---- the run


def shrink() -> None:
    """Make both tiers small, for trying this script."""
    TIERS["272p"] = Tier("272p", 64, 64, 2)
    TIERS["540p"] = Tier("540p", 96, 64, 3)


def run_part_alone(part: str, arguments: argparse.Namespace, checks: Checks) -> None:
    """Run one part in a process of its own and take over its rows."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--out", folder, "--device", arguments.device, "--only", part]
        done = subprocess.run(words + ["--tiny"] * arguments.tiny, check=False)
        result = Path(folder) / "gpu_check.json"
        rows = json.loads(result.read_text("utf-8"))["checks"] if result.is_file() else []
        checks.rows += rows
        if done.returncode != 0 and all(row["ok"] for row in rows):
            checks.add(f"{part}: the process", ok=False, exit_code=done.returncode)


def main() -> int:
    """Run the parts that were asked for and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for trying the script")
    parser.add_argument("--only", choices=PARTS, action="append")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(arguments.out, torch.device(arguments.device), arguments.tiny)
    if setting.is_tiny:
        shrink()
    checks = Checks()
    parts = arguments.only or PARTS
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tiny"
        if set(parts) & {"renders", "strict"}:
            write_tiny_checkpoint(root)
        # Strict mode must be set before CUDA starts and holds for the process: it comes first or runs alone.
        if parts == ["strict"]:
            run_strict(checks, setting, root)
        elif "strict" in parts:
            run_part_alone("strict", arguments, checks)
        if "renders" in parts:
            run_renders(checks, setting, root)
        if "layers" in parts:
            run_layers(checks, setting)
    is_cuda = setting.device.type == "cuda"
    record = {
        "device": torch.cuda.get_device_name(setting.device) if is_cuda else platform.processor(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "is_tiny": setting.is_tiny,
        "seconds": round(time.monotonic() - begin, 1),
        "checks": checks.rows,
    }
    (arguments.out / "gpu_check.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = [row["check"] for row in checks.rows if not row["ok"]]
    print(f"{len(checks.rows)} checks, failed: {failed or 'none'}, {record['seconds']} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
