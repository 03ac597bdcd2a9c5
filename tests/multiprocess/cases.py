"""What every rank of a world checks: layouts against one rank's model, and mutations that must be noticed."""

import io
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.distributed.tensor import DTensor

from magi2 import packing
from magi2.checkpoint.index import scan_files, scan_folder
from magi2.checkpoint.keys import build_on_meta
from magi2.checkpoint.load import fill
from magi2.config import EngineConfig, SamplingConfig
from magi2.contract import TIERS, GenerationRequest, Tier
from magi2.errors import CheckpointError, EngineError, Stopped
from magi2.media.writer import ClipWriter
from magi2.model import transformer as transformer_module
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.parallel import tensor, ulysses
from magi2.parallel.layout import Layout, check_released, rank_groups, span, split_lengths
from magi2.parallel.memory import plan, rank_bytes
from magi2.pipeline import Magi2Pipeline
from magi2.sampling.guidance import guide
from magi2.sampling.unipc import FlowUniPC, schedule
from magi2.vae.turbo import TurboDecoder
from tests import tolerances
from tests.golden.discovery import matching
from tests.golden.dit_cases import batch_of, read_case, read_config
from tests.golden.test_dit import noisy_time_row
from tests.multiprocess.models import (
    CONFIGS,
    BranchesApart,
    conditioning,
    latents,
    load,
    predict,
    seeded,
    solve,
)
from tests.multiprocess.registry import case, groups_of, largest_error
from tests.multiprocess.spawn import Case, World

GOLDEN = Path(__file__).parents[1] / "golden"

# ---- layouts against the oracle: name, ranks, model, layout, tolerance
ORACLE = {
    "SP2": (2, "plain", Layout(ulysses=2), tolerances.SEQUENCE_PARALLEL),
    "SP2 with EP1": (2, "plain", Layout(ulysses=2, ep=1), tolerances.SEQUENCE_PARALLEL),
    "SP2 with 3 MoE heads": (2, "three", Layout(ulysses=2), tolerances.SEQUENCE_PARALLEL),
    "TP2": (2, "plain", Layout(tp=2), tolerances.TENSOR_PARALLEL),
    "TP2 with 2 key heads": (2, "grouped", Layout(tp=2), tolerances.TENSOR_PARALLEL),
    "CFG2": (2, "plain", Layout(cfg_parallel=2), tolerances.SEQUENCE_PARALLEL),
    "SP4": (4, "plain", Layout(ulysses=4), tolerances.SEQUENCE_PARALLEL),
    "SP4 with EP2": (4, "plain", Layout(ulysses=4, ep=2), tolerances.SEQUENCE_PARALLEL),
    "SP4 with EP1": (4, "plain", Layout(ulysses=4, ep=1), tolerances.SEQUENCE_PARALLEL),
    "SP4 with 3 MoE heads and 12 attention heads": (
        4,
        "idle",
        Layout(ulysses=4),
        tolerances.SEQUENCE_PARALLEL,
    ),
    "SP4 with 2 key heads": (4, "grouped", Layout(ulysses=4), tolerances.SEQUENCE_PARALLEL),
    "TP4": (4, "plain", Layout(tp=4), tolerances.TENSOR_PARALLEL),
    "TP2SP2": (4, "plain", Layout(tp=2, ulysses=2), tolerances.TENSOR_PARALLEL),
    "SP8 one forward": (8, "eight", Layout(ulysses=8), tolerances.SEQUENCE_PARALLEL),
}


def equals_oracle(name: str) -> Case:
    _, model, layout, tolerance = ORACLE[name]

    def run(at: World) -> None:
        with groups_of(at, layout) as groups:
            own = load(at.folder, model, groups)
            for with_image in (False, True):
                want = predict(load(at.folder, model), with_image=with_image)
                error = largest_error(predict(own, with_image=with_image), want)
                assert error <= tolerance, f"differs from one rank by {error}"
            held = sum(t.numel() * t.element_size() for t in own.state_dict().values())
            assert held == rank_bytes(CONFIGS[model], layout, groups.ep.position)

    return run


for _name, (_world, *_) in ORACLE.items():
    case(_world, _name)(equals_oracle(_name))


@case(4, "SP4 with a modality absent on a rank")
def absent_modality(at: World) -> None:
    with groups_of(at, Layout(ulysses=4)) as groups:
        batch = packing.pack(*latents(), conditioning())
        assert batch.segment_lengths == (21, 16)
        own = load(at.folder, "plain", groups).prepare(batch).tokens
        assert own.lengths == (10, 9, 9, 9)
        seen = {run.modality for run in own.blocks}
        assert (packing.TEXT in seen) == (at.rank != 0)


@case(4, "SP4 in bf16 is near")
def bf16(at: World) -> None:
    with groups_of(at, Layout(ulysses=4)) as groups:
        got, want = predict(load(at.folder, "bf16", groups))[0], predict(load(at.folder, "bf16"))[0]
        assert float((got - want).norm() / want.norm()) <= tolerances.DIT_BF16_FORWARD


@case(4, "SP4 repeats its bits")
def repeats(at: World) -> None:
    with groups_of(at, Layout(ulysses=4)) as groups:
        first, second = (predict(load(at.folder, "bf16", groups)) for _ in range(2))
        assert largest_error(first, second) == 0.0


def in_two_exchanges(names: dict[str, list[int]]) -> Case:
    """As on a device: half of a rank's heads travel while the other half is attended to."""

    def run(at: World) -> None:
        for name, counts in names.items():
            num_keys = sum(counts)
            assert ulysses.halves(num_keys, torch.device("cuda")) == counts
            assert ulysses.halves(num_keys, torch.device("cpu")) == [num_keys]
            with groups_of(at, Layout(ulysses=at.size)) as groups:
                with mock.patch.object(ulysses, "halves", lambda _keys, _device, counts=counts: counts):
                    got = predict(load(at.folder, name, groups))
                error = largest_error(got, predict(load(at.folder, name)))
                assert error <= tolerances.SEQUENCE_PARALLEL, f"{name}: differs from one rank by {error}"

    return run


case(2, "SP2 in two exchanges")(in_two_exchanges({"plain": [1, 1], "three": [2, 1]}))
case(4, "SP4 in two exchanges")(in_two_exchanges({"eight": [1, 1], "idle": [2, 1]}))


# ---- branch parallelism: guidance and solver steps


def guided_step(model: Magi2Transformer) -> tuple[Tensor, Tensor]:
    """The first of four steps: prediction, guidance and solver."""
    plan_of_steps, sampling = schedule(4, SamplingConfig().shift), SamplingConfig()
    predicted = predict(model, timestep=plan_of_steps.timesteps[0])
    scales = (sampling.video_guidance, sampling.audio_guidance)
    moved = [
        FlowUniPC(plan_of_steps).step(guide(velocity, scale), latent)
        for velocity, scale, latent in zip(predicted, scales, latents(), strict=True)
    ]
    return moved[0], moved[1]


@case(4, "CFG2SP2")
def branch_parallel(at: World) -> None:
    with groups_of(at, Layout(cfg_parallel=2, ulysses=2)) as groups:
        model = load(at.folder, "plain", groups)
        oracle = load(at.folder, "plain")
        assert largest_error(predict(model), predict(oracle)) <= tolerances.SEQUENCE_PARALLEL
        error = largest_error(guided_step(model), guided_step(oracle))
        assert error <= tolerances.SEQUENCE_PARALLEL, f"differs from one rank by {error}"
        two_steps = solve(model)
        for latent in two_steps:
            assert all(torch.equal(other, latent) for other in groups.world.stack(latent))
        assert largest_error(two_steps, solve(oracle)) <= tolerances.GUIDED_STEPS
        counts = TransformerDenoiser(model, conditioning()).token_counts(*latents())
        assert [branch["text"] for branch in counts] == [8, 3]


@case(2, "CFG2 equals each branch alone")
def branches_alone(at: World) -> None:
    """Guidance enlarges the rounding of other row counts; against equal row counts no bit differs."""
    with groups_of(at, Layout(cfg_parallel=2)) as groups:
        got = solve(load(at.folder, "plain", groups))
        assert largest_error(got, solve(load(at.folder, "plain"), denoiser_type=BranchesApart)) == 0.0


# ---- sharding: exact

HSDP = {
    "HSDP4+SP4": Layout(ulysses=4),
    "HSDP4+CFG2SP2": Layout(cfg_parallel=2, ulysses=2),
}


def equals_unsharded(resident: Layout) -> Case:
    sharded = Layout(ulysses=resident.ulysses, cfg_parallel=resident.cfg_parallel, hsdp=True)

    def run(at: World) -> None:
        for name in ("plain", "bf16"):
            with groups_of(at, resident) as groups:
                want = solve(unmapped(load(at.folder, name, groups)))
            with groups_of(at, sharded) as groups:
                model = load(at.folder, name, groups)
                held = own_bytes(model)
                assert held <= plan(CONFIGS[name], sharded).weights * 1.05 + 4096
                for _ in range(2):
                    error = largest_error(solve(model), want)
                    assert error == 0.0, f"{name}: differs by {error}"
                assert own_bytes(model) == held

    return run


def unmapped(model: Magi2Transformer) -> Magi2Transformer:
    """Copy what is no expert out of the mapped file: matrix products on a CPU depend on the alignment."""
    for name, stored in [*model.named_parameters(), *model.named_buffers()]:
        if ".moe_mlp." not in name:
            stored.data = stored.data.clone()
    return model


def own_bytes(model: Magi2Transformer) -> int:
    state = model.state_dict().values()
    own = [t.to_local() if isinstance(t, DTensor) else t for t in state]
    return sum(t.numel() * t.element_size() for t in own)


for _name, _layout in HSDP.items():
    case(4, _name)(equals_unsharded(_layout))


# ---- golden forwards: their three MoE heads take the padded path


def equals_golden(at: World) -> None:
    [folder] = {path.parent for path in matching(GOLDEN, "dit", r".*_config\.json")}
    [weights] = folder.glob("*_weights.safetensors")
    config = read_config(folder).with_dtype("float32")
    with groups_of(at, Layout(ulysses=at.size)) as groups:
        model = fill(build_on_meta(config), scan_files([weights]), groups=groups)
        for path in sorted(folder.glob("full_*.safetensors")):
            golden = read_case(path)
            batch = batch_of(golden, config)
            out = model(model.prepare(batch), batch.video, batch.audio, noisy_time_row(golden, batch))
            rows = torch.zeros(batch.num_tokens, dtype=torch.bool)
            for part in batch.parts:
                rows[part.start : part.stop] = part.kind.is_generated
            wanted = {name: value for name, value in golden.of("fp32").items() if name.startswith("out")}
            assert wanted, path
            for value in wanted.values():
                torch.testing.assert_close(out[rows], value[rows], **tolerances.DIT_FP32)


case(2, "golden full forwards SP2")(equals_golden)
case(4, "golden full forwards SP4")(equals_golden)


# ---- video windows


def spread_decode(at: World) -> None:
    decoder = TurboDecoder.load(at.folder / "turbo_vae", torch.float32)
    with groups_of(at, Layout(ulysses=at.size, vae_patch_parallel=at.size)) as groups:
        # Two windows of the same length, a tail that is padded, and fewer windows than ranks.
        for num_latents in (32, 16, 9, 5):
            latent = seeded(1, 48, num_latents, 1, 2, seed=num_latents)
            got = list(decoder.decode(latent, groups.world))
            if at.rank == 0:
                want = list(decoder.decode(latent))
                assert len(got) == len(want)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            else:
                assert got == []


case(4, "VAE PP4")(spread_decode)
case(2, "VAE PP2")(spread_decode)


# ---- the whole pipeline

FEW_TOKENS = Tier("272p", 128, 64, 4)
REQUEST = GenerationRequest("a red kite over the sea", "272p", 2, seed=7, has_image=True)


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


@case(4, "SP4 whole pipeline")
def whole_render(at: World) -> None:
    engine = EngineConfig(at.folder / "tiny", dtype="float32")
    layout = Layout(ulysses=4, vae_patch_parallel=4)
    with mock.patch.dict(TIERS, {"272p": FEW_TOKENS}), groups_of(at, layout) as groups:
        pipeline = Magi2Pipeline(engine, groups=groups)
        first = pipeline(REQUEST, image=picture())
        with ClipWriter(at.folder / "gone" / f"{at.rank}.mp4") as writer:
            second = pipeline(REQUEST, image=picture(), writer=writer)
            # Told at the end alone: until then the other ranks count on this one's part of the decoding.
            with pytest.raises(EngineError, match="encoded or written" if at.rank == 0 else "no clip"):
                writer.finish()
        # Three phases begin, then two steps.
        asked = iter([False, False, False, False, True])
        with pytest.raises(Stopped, match="stopped after step 1 of 2"):
            # Only the output rank wants to stop, and all leave at the same step.
            pipeline(REQUEST, image=picture(), should_stop=lambda: at.rank == 0 and next(asked))
        assert pipeline.fingerprint()["layout"] == str(layout)
        pipeline.close()
        if at.rank != 0:
            assert (first, second) == (None, None)
            return
        assert torch.equal(first.clip.frames, second.clip.frames)
        assert torch.equal(first.clip.samples, second.clip.samples)
        alone = Magi2Pipeline(engine)
        want = alone(REQUEST, image=picture())
        alone.close()
        error = (first.clip.frames.double() - want.clip.frames.double()).square().mean()
        assert 10 * torch.log10(255**2 / error.clamp_min(1e-12)) >= tolerances.RENDER_PSNR_DB
        assert first.stats.conditioning == want.stats.conditioning


# ---- loading


@case(4, "SP4 loading reads own rows")
def own_rows_only(at: World) -> None:
    with groups_of(at, Layout(ulysses=4)) as groups:
        model = load(at.folder, "idle", groups)
        experts = model.block.layers[1].mlp.moe_mlp
        assert experts.W_gate.shape[0] == (0 if at.rank == 3 else CONFIGS["idle"].moe.num_experts)
        stored = load(at.folder, "idle").block.layers[1].mlp.moe_mlp
        first = at.rank * CONFIGS["idle"].moe.num_experts
        for name, own in experts.named_parameters():
            # A view of the mapped file, never a copy beside it.
            assert own.untyped_storage().nbytes() > own.numel() * own.element_size()
            whole = stored.get_parameter(name)
            assert torch.equal(own, whole[first : first + own.shape[0]])


@case(4, "SP4 loading is strict on every rank")
def strict(at: World) -> None:
    contents = scan_folder(at.folder / "plain")
    del contents.tensors["block.layers.2.mlp.moe_mlp.W_up"]
    with groups_of(at, Layout(ulysses=4)) as groups:  # noqa: SIM117 - the groups outlive the refusal
        with pytest.raises(CheckpointError, match=r"^block\.layers\.2\.mlp\.moe_mlp\.W_up is missing$"):
            fill(build_on_meta(CONFIGS["plain"]), contents, groups=groups)


# ---- groups


def agreeing(at: World) -> None:
    with groups_of(at, Layout(ulysses=at.size)) as groups:
        assert groups.replica.agree(wanted=at.rank == 0)
        assert not groups.replica.agree(wanted=at.rank != 0)
        sent = [seeded(2, 3, seed=1), seeded(0, 4, seed=1).bfloat16(), torch.tensor([3])]
        got = groups.replica.share(sent if at.rank == 0 else None, torch.device("cpu"))
        assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.int64]
        assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
        lengths = split_lengths(7, at.size)
        first, last = span(lengths, at.rank)
        assert torch.equal(groups.sp.join_rows(torch.arange(first, last), lengths), torch.arange(7))


case(2, "groups agree: 2")(agreeing)
case(4, "groups agree: 4")(agreeing)

CONSTRUCTED = {
    "groups: SP8": Layout(ulysses=8),
    "groups: TP2SP4": Layout(tp=2, ulysses=4),
    "groups: TP4SP2": Layout(tp=4, ulysses=2),
    "groups: CFG2SP4": Layout(cfg_parallel=2, ulysses=4),
    "groups: DP2SP4": Layout(data_parallel=2, ulysses=4, dlo=True),
}


def constructed(layout: Layout) -> Case:
    def run(at: World) -> None:
        table = rank_groups(layout)
        check_released(layout)
        with groups_of(at, layout) as groups:
            for axis in ("tp", "sp", "cfg", "dp", "ep", "replica", "weights", "world"):
                group = getattr(groups, axis)
                wanted = next((ranks for ranks in table[axis] if at.rank in ranks), (at.rank,))
                assert group.ranks == wanted, axis
                total = group.add_up(torch.tensor([float(at.rank)]))
                assert float(total[0]) == sum(wanted), axis

    return run


for _name, _layout in CONSTRUCTED.items():
    case(8, _name)(constructed(_layout))


# ---- mutations: each must move the result away from the oracle


def shifted(lengths: tuple[int, ...], part: int) -> tuple[int, int]:
    first, last = span(lengths, part)
    return (first, last) if part == 0 else (first - 1, last - 1)


def neighbours_sinks(group: ulysses.Group, sinks: Tensor) -> Tensor:
    return sinks.chunk(group.size, dim=1)[(group.position + 1) % group.size]


def flat_rows(name: str) -> Callable[..., list[int] | None]:
    whole = tensor._row_blocks

    def cut(tensor_name: str, shape: tuple[int, ...], config: object) -> list[int] | None:
        return [shape[0]] if name in tensor_name else whole(tensor_name, shape, config)

    return cut


MUTATIONS = {
    "shifting a split by one": (Layout(ulysses=4), mock.patch.object(transformer_module, "span", shifted)),
    "swapping sinks": (Layout(ulysses=4), mock.patch.object(ulysses, "own_heads", neighbours_sinks)),
    "cutting queries, keys and values as one": (
        Layout(tp=4),
        mock.patch.object(tensor, "_row_blocks", flat_rows("linear_qkv")),
    ),
    "cutting all copies of a gate as one": (
        Layout(tp=4),
        mock.patch.object(tensor, "_row_blocks", flat_rows("up_gate_proj")),
    ),
}


def is_noticed(layout: Layout, mutation: mock._patch) -> Case:
    def run(at: World) -> None:
        with groups_of(at, layout) as groups:
            want = predict(load(at.folder, "plain"))
            with mutation:
                error = largest_error(predict(load(at.folder, "plain", groups)), want)
            assert error > 100 * tolerances.TENSOR_PARALLEL, f"the mutation moved the result by {error} only"

    return run


for _name, (_layout, _mutation) in MUTATIONS.items():
    case(4, f"mutation: {_name}")(is_noticed(_layout, _mutation))
