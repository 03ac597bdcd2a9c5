"""Weight streaming on one GPU at released sizes, with random weights: what it hides, holds and equals.

Parts, each usable alone by `--only`; a whole run is meant to take less than ten minutes on one H200:
- link: the rate of page-locked copies, which bounds everything.
- equal: four released-size layers, streamed by layer and by MoE head, against the same layers resident.
- stream: one step through 40 layers at the tokens of a tier with nothing resident, by layer and by MoE head,
  timed by events: milliseconds that computing stood still for each block, GB/s of the copies, peak memory
  beside the calculator's figure. Where host memory does not hold 212 GiB, a few distinct layers' masters
  serve all (`--pool`); their copies are as large as the real ones'.
- share: two processes of one GPU map and register one flat.
- text: the text tower at released size: staged as a whole and streamed for 800 tokens, seconds and peak.
- request: warm requests of one 272p step, all networks of released size (`warm_request.py`), <= 5 s.

Usage: python benchmarks/stream_gpu.py --out DIR [--only PART ...] [--tier 272p 540p] [--tiny --device cpu]
`--tiny` runs everything at small sizes, also on a CPU. Exit code 1 if a check fails. Writes
`stream_gpu.json`.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tree itself, installed or not

import torch
from torch import Tensor, nn

from benchmarks.warm_request import measure_request
from magi2 import determinism, packing
from magi2.checkpoint.keys import build_on_meta
from magi2.config import ModelConfig
from magi2.contract import NUM_AUDIO_LATENTS, NUM_LATENT_FRAMES, TIERS
from magi2.model.layer import Layer
from magi2.model.streamed import StreamedLayer, Streamer, cuts_of, targets_of
from magi2.model.tokens import Tokens, cut
from magi2.offload.flats import Need, Piece, plan_piece, stamp
from magi2.offload.layers import stream_layers
from magi2.offload.lazy import HostRuntime
from magi2.offload.masters import Masters, PrivateMemory
from magi2.offload.ring import Ring
from magi2.offload.runtime import CudaRuntime, Runtime, Stream
from magi2.offload.shared import SharedMemory
from magi2.offload.staging import Stage
from magi2.parallel.layout import Layout
from magi2.parallel.memory import BY_HEAD, BY_LAYER, GIB, plan

PARTS = ("link", "equal", "stream", "share", "text", "request")
TEXT_LENGTHS = (2000, 450)
TEXT_TOKENS = 800
# The published tower without the two layers that are not run.
TEXT_SIZES = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 62,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
TEXT_SIZES_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@dataclass(frozen=True)
class Setting:
    """What the command line asked for."""

    device: torch.device
    is_tiny: bool
    num_distinct: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.tiny() if self.is_tiny else ModelConfig.released()

    def runtime(self) -> Runtime:
        return HostRuntime() if self.device.type == "cpu" else CudaRuntime(self.device)


@dataclass
class Rows:
    """Figures as they come, and whether each check holds."""

    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, name: str, *, ok: bool = True, **facts: object) -> None:
        self.rows.append({"row": name, "ok": bool(ok), **facts})
        shown = "  ".join(f"{key}={value}" for key, value in facts.items())
        print(f"{'ok  ' if ok else 'MISS'}  {name:<44} {shown}", flush=True)


class EventMeter:
    """Times of a ring by CUDA events; on a CPU it counts only."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.copies: list[tuple[int, Any, Any]] = []
        self.waits: list[tuple[int, Any, Any]] = []

    def event(self, stream: Stream) -> Any:
        if not isinstance(self._runtime, CudaRuntime):
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._runtime.queue(stream))
        return event

    def copied(self, number: int, begin: Any, end: Any) -> None:
        self.copies.append((number, begin, end))

    def waited(self, number: int, begin: Any, end: Any) -> None:
        self.waits.append((number, begin, end))

    @staticmethod
    def total_ms(spans: list[tuple[int, Any, Any]]) -> float:
        return sum(begin.elapsed_time(end) for _, begin, end in spans if begin is not None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def peak_gib(device: torch.device) -> Iterator[Callable[[], float]]:
    """Yield what tells the peak of allocated memory since the begin."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def tokens_of(setting: Setting, tier: str) -> Tokens:
    """Return the packed sequence of a clip of a tier, both branches."""
    size = TIERS[tier]
    frames, height, width = (
        (2, 2, 3) if setting.is_tiny else (NUM_LATENT_FRAMES, size.latent_height, size.latent_width)
    )
    lengths = (8, 3) if setting.is_tiny else TEXT_LENGTHS
    video, audio = torch.zeros(1, 48, frames, height, width), torch.zeros(1, NUM_AUDIO_LATENTS, 64)
    text = tuple(torch.zeros(1, length, 8) for length in lengths)
    batch = packing.pack(video, audio, packing.Conditioning((text[0], text[1])))
    pairs = 6 * setting.model.num_bands
    angles = torch.rand(batch.num_tokens, pairs // 2, device=setting.device)
    return Tokens(
        blocks=tuple(cut(batch.runs, setting.model.stream_width, setting.device)),
        segment_bounds=batch.segment_bounds,
        rope=torch.cat([angles.sin(), angles.cos()], dim=1),
        lengths=(batch.num_tokens,),
        moe_lengths=(batch.num_tokens,),
    )


def streams_of(setting: Setting, tokens: Tokens) -> Tensor:
    model = setting.model
    generator = torch.Generator(setting.device).manual_seed(3)
    shape = (tokens.num_tokens, model.mhc.num_streams, model.hidden_size)
    return torch.randn(shape, generator=generator, device=setting.device, dtype=torch.bfloat16)


class Pool:
    """A stack of streamed layers whose masters are those of a few distinct ones.

    Args:
        setting: Sizes and device.
        layers: Which layers of the model, in order.
        by: How they are cut.
    """

    def __init__(self, setting: Setting, layers: list[int], by: str) -> None:
        model = build_on_meta(setting.model)
        self.by, self.runtime = by, setting.runtime()
        self.layers = [model.block.layers[index] for index in layers]
        self.cuts = [cuts_of(layer, by) for layer in self.layers]
        self.pieces: list[Piece] = []
        targets: list[Mapping[str, Tensor]] = []
        places, blocks, templates = {}, {}, {}
        for place, (index, layer, cuts) in enumerate(zip(layers, self.layers, self.cuts, strict=True)):
            state = layer.state_dict()
            kind = (index in setting.model.mm_layers, place % setting.num_distinct)
            _make_room(layer, setting.device)
            for step, own in enumerate(cuts):
                needs = {p.name: Need(_shape(state[p.name], p.rows), state[p.name].dtype) for p in own.parts}
                number = templates.setdefault((kind, step), len(templates))
                piece = plan_piece(number, number, needs)
                blocks.setdefault(number, [piece])
                places[place, step] = len(self.pieces)
                self.pieces.append(piece)
                targets.append(targets_of(layer, own))
        self.masters = Masters(self.runtime, PrivateMemory(), blocks, 1)
        for own in blocks.values():
            _draw(self.masters, own[0])
        self.masters.lock()
        self.ring = Ring(self.runtime, self.pieces, targets, self.masters)
        self.places = places
        streamer = Streamer(self.runtime, self.ring, places)
        last = len(layers) - 1
        self.streamed = [
            StreamedLayer(layer, place, cuts, streamer, is_last=place == last)
            for place, (layer, cuts) in enumerate(zip(self.layers, self.cuts, strict=True))
        ]

    @torch.no_grad()
    def step(self, streams: Tensor, tokens: Tokens) -> Tensor:
        for layer in self.streamed:
            streams = layer(streams, tokens)
        return streams

    @torch.no_grad()
    def step_resident(self, streams: Tensor, tokens: Tokens, device: torch.device) -> Tensor:
        """The same layers with all weights on the device; needs room for them."""
        kept = []
        for place, layer in enumerate(self.layers):
            own = [p for (at, _), p in sorted(self.places.items()) if at == place]
            whole: dict[str, list[Tensor]] = {}
            for index in own:
                for flat in self.pieces[index].flats:
                    buffer = self.masters.of(self.pieces[index].number)[flat.dtype].to(device)
                    for name, view in flat.views(buffer):
                        whole.setdefault(name, []).append(view)
            state = dict(layer.named_parameters()) | dict(layer.named_buffers())
            for name, parts in whole.items():
                state[name].data = parts[0] if len(parts) == 1 else torch.cat(parts)
            kept.append(state)
            streams = layer(streams, tokens)
        synchronize(device)
        for state in kept:
            for tensor in state.values():
                tensor.data = tensor.data.new_empty(0)
        return streams

    def close(self) -> None:
        self.ring.close()


def _shape(tensor: Tensor, rows: tuple[int, int] | None) -> tuple[int, ...]:
    return tuple(tensor.shape) if rows is None else (rows[1] - rows[0], *tensor.shape[1:])


def _make_room(layer: Layer, device: torch.device) -> None:
    """Replace tensors without memory by empty ones that a ring can bind."""
    for name, like in [*layer.named_parameters(), *layer.named_buffers()]:
        path, _, last = name.rpartition(".")
        empty = torch.empty(0, dtype=like.dtype, device=device)
        fresh = nn.Parameter(empty, requires_grad=False) if isinstance(like, nn.Parameter) else empty
        setattr(layer.get_submodule(path), last, fresh)


def _draw(masters: Masters, piece: Piece) -> None:
    """Fill a master with weights of harmless size: one drawn row, repeated, as drawing 6 GB takes minutes."""
    opened = masters.open_block(piece.block)
    for flat in piece.flats:
        whole = opened[piece.number, flat.dtype]
        generator = torch.Generator().manual_seed(piece.number)
        sample = (0.02 * torch.randn(1_000_003, generator=generator)).to(flat.dtype)
        for first in range(0, whole.numel(), sample.numel()):
            part = whole[first : first + sample.numel()]
            part.copy_(sample[: part.numel()])
        stamp(whole, piece.number)


# ---- the parts


def measure_link(setting: Setting, rows: Rows) -> float:
    """Return GB/s of one large page-locked copy."""
    runtime, nbytes = setting.runtime(), (2**20 if setting.is_tiny else 4 * GIB)
    host = PrivateMemory().block(0, nbytes)
    is_locked = runtime.register(host)
    target = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    best = float("inf")
    for _ in range(3):
        synchronize(setting.device)
        begin = time.perf_counter()
        runtime.copy(target, host)
        runtime.synchronize(runtime.record(Stream.COPY))
        best = min(best, time.perf_counter() - begin)
    rate = nbytes / best / 1e9
    rows.add("page-locked copy, 4 GiB", ok=is_locked, gb_per_s=round(rate, 1), registered=is_locked)
    runtime.unregister(host)
    return rate


def check_equal(setting: Setting, rows: Rows) -> None:
    """Four layers of both kinds, streamed twice by each cut, against resident ones: the same bytes."""
    layers = [0, 1, 2, 4] if setting.is_tiny else [0, 2, 3, 39]
    tokens = tokens_of(setting, "272p")
    for by in (BY_LAYER, BY_HEAD):
        pool = Pool(setting, layers, by)
        want = pool.step_resident(streams_of(setting, tokens), tokens, setting.device)
        for attempt in (1, 2):
            got = pool.step(streams_of(setting, tokens), tokens)
            synchronize(setting.device)
            differing = int((got.view(torch.int16) != want.view(torch.int16)).sum())
            rows.add(f"4 layers by {by}, pass {attempt}: equal bytes", ok=differing == 0, differing=differing)
        pool.close()
        del want


def measure_stream(setting: Setting, rows: Rows, tier: str, by: str, rate: float) -> None:
    """One warm step of 40 layers with nothing resident."""
    config = setting.model
    layers = list(range(config.num_layers))
    pool = Pool(setting, layers, by)
    tokens = tokens_of(setting, tier)
    with peak_gib(setting.device) as peak:
        streams = streams_of(setting, tokens)
        pool.step(streams, tokens)  # compiles, fills the ring, and leaves the first block on its way
        pool.ring.meter = meter = EventMeter(pool.runtime)
        synchronize(setting.device)
        begin = time.perf_counter()
        pool.step(streams, tokens)
        synchronize(setting.device)
        seconds = time.perf_counter() - begin
        reached = peak()
    exposed, copying = meter.total_ms(meter.waits), meter.total_ms(meter.copies)
    copied = sum(piece.nbytes for piece in pool.pieces)
    layout = Layout(layerwise=True)
    needed = plan(config, layout, tier=tier, stream_by=by)
    planned = (needed.buffers + needed.activations) / GIB
    achieved = copied / max(copying, 1e-9) / 1e6
    share = exposed / (seconds * 1e3)
    # Where computing is longer it hides the copies; where copies are longer they run at the link's rate.
    is_bound = copied / 1e9 / rate > seconds * 0.9
    ok = setting.is_tiny or (achieved >= 0.9 * rate if is_bound else share <= 0.05)
    rows.add(
        f"40 layers, {tier}, by {by}, nothing resident",
        ok=ok,
        step_s=round(seconds, 3),
        exposed_ms=round(exposed, 1),
        exposed_ms_a_block=round(exposed / config.num_layers, 3),
        exposed_share=round(share, 4),
        copies_gb_per_s=round(achieved, 1),
        gigabytes=round(copied / 1e9, 1),
        is_transfer_bound=is_bound,
    )
    is_near = setting.is_tiny or abs(reached - planned) <= 0.05 * planned
    rows.add(
        f"peak device memory, {tier}, by {by}",
        ok=is_near,
        peak_gib=round(reached, 2),
        planned_gib=round(planned, 2),
        slots_gib=round(pool.ring.nbytes / GIB, 2),
        fits_24_gb=reached * GIB < 24e9,
    )
    pool.close()


def _second_user(folder: str, nbytes: int, kind: str, pipe: Any) -> None:
    device = torch.device(kind)
    runtime = HostRuntime() if device.type == "cpu" else CudaRuntime(device)
    memory = SharedMemory(Path(folder), "key")
    flat = memory.block(0, nbytes)
    is_locked = runtime.register(flat)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    runtime.copy(target, flat)
    runtime.synchronize(runtime.record(Stream.COPY))
    pipe.send((memory.digest_of(0), is_locked, int(target[-1])))
    runtime.unregister(flat)
    memory.close()


def check_share(setting: Setting, rows: Rows) -> None:
    """Two processes, one file, both registered, one copy of the bytes."""
    nbytes = 2**20 if setting.is_tiny else 2 * GIB
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=base) as folder:
        first, runtime = SharedMemory(Path(folder), "key"), setting.runtime()
        flat = first.block(0, nbytes)
        flat.fill_(7)
        first.fill_done(0, 7)
        first.all_done()
        is_locked = runtime.register(flat)
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        other = context.Process(target=_second_user, args=(folder, nbytes, str(setting.device), writer))
        other.start()
        digest, other_locked, value = reader.recv()
        other.join()
        runtime.unregister(flat)
        rows.add(
            "two processes share one registered flat",
            ok=(digest, value) == (7, 7) and is_locked and other_locked,
            first_registered=is_locked,
            second_registered=other_locked,
            gib=round(nbytes / GIB, 2),
        )
        first.close()


def text_tower(setting: Setting) -> Any:
    """Build the text tower with repeated random rows, on the host."""
    # Imported here: transformers takes seconds, and one part alone needs it.
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    config = Qwen3_5TextConfig(**(TEXT_SIZES_TINY if setting.is_tiny else TEXT_SIZES))
    with torch.device("meta"):
        tower = Qwen3_5TextModel(config).to(torch.bfloat16)
    tower.to_empty(device="cpu")
    sample = 0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(1))
    for tensor in tower.parameters():
        flat = tensor.data.view(-1)
        for first in range(0, flat.numel(), sample.numel()):
            part = flat[first : first + sample.numel()]
            part.copy_(sample[: part.numel()])
    # Its table is no parameter, so it was emptied too.
    tower.rotary_emb = type(tower.rotary_emb)(config=config)
    tower.norm = nn.Identity()
    return tower.eval()


def measure_text(setting: Setting, rows: Rows) -> None:
    """Stage the whole tower and encode; then stream its layers and encode the same: equal features."""
    tower = text_tower(setting)
    nbytes = sum(tensor.nbytes for tensor in tower.parameters())
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, tower.config.vocab_size, (1, TEXT_TOKENS), generator=generator)

    @torch.no_grad()
    def encode() -> Tensor:
        embedded = tower.embed_tokens(ids.to(tower.embed_tokens.weight.device)).to(setting.device)
        out: Tensor = tower(inputs_embeds=embedded, use_cache=False).last_hidden_state
        synchronize(setting.device)
        return out

    stage = Stage(setting.device)
    stage.pin(tower)
    with peak_gib(setting.device) as peak:
        for attempt in ("first", "warm"):
            begin = time.perf_counter()
            with stage.holding(tower):
                synchronize(setting.device)
                staged = time.perf_counter() - begin
                want = encode()
            seconds = time.perf_counter() - begin
            rows.add(
                f"text tower staged whole, {attempt}",
                gib=round(nbytes / GIB, 2),
                staging_s=round(staged, 3),
                total_s=round(seconds, 3),
                peak_gib=round(peak(), 2),
            )
    runtime = setting.runtime()
    ring = stream_layers(tower.layers, runtime)
    tower.rotary_emb.to(setting.device)
    with peak_gib(setting.device) as peak:
        for attempt in ("first", "warm"):
            begin = time.perf_counter()
            got = encode()
            seconds = time.perf_counter() - begin
            rows.add(
                f"text tower streamed, {TEXT_TOKENS} tokens, {attempt}",
                ok=setting.device.type == "cpu" or torch.equal(got, want),
                total_s=round(seconds, 3),
                peak_gib=round(peak(), 2),
                slots_gib=round(ring.nbytes / GIB, 2),
                largest_difference=float((got - want).abs().max()),
            )
    ring.close()
    stage.close()


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description="Weight streaming on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tier", nargs="+", choices=list(TIERS), default=["272p", "540p"])
    parser.add_argument("--by", nargs="+", choices=(BY_LAYER, BY_HEAD), default=[BY_LAYER, BY_HEAD])
    parser.add_argument("--pool", type=int, default=6, help="distinct layers of each kind on the host")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    determinism.configure(deterministic=False)
    setting = Setting(torch.device(arguments.device), arguments.tiny, arguments.pool)
    rows, rate = Rows(), 54.0
    begin = time.monotonic()
    if "link" in arguments.only:
        rate = measure_link(setting, rows)
    if "equal" in arguments.only:
        check_equal(replace(setting, num_distinct=4), rows)
    if "stream" in arguments.only:
        for tier in arguments.tier:
            for by in arguments.by:
                measure_stream(setting, rows, tier, by, rate)
    if "share" in arguments.only:
        check_share(setting, rows)
    if "text" in arguments.only:
        measure_text(setting, rows)
    if "request" in arguments.only:
        measure_request(setting.device, text_tower(setting), rows, is_tiny=setting.is_tiny)
    name = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else platform.machine()
    report = {
        "device": name,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begin, 1),
        "rows": rows.rows,
    }
    (arguments.out / "stream_gpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{report['seconds']} s in all")
    return 0 if all(row["ok"] for row in rows.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
