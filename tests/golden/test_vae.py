"""Image encoder, video decoder, audio decoder and what follows them against the reference's stored numbers.

Cases are found by file name at any depth; case names, configurations and sizes are read from the files. The
Wan decoder's cases (`dec*`) are never collected: the product has no such decoder. Weights go through the real
loaders, from checkpoint files that are written here. `pcm16` checks a helper of this module alone.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from magi2.contract import TIERS
from magi2.media.clip import Clip
from magi2.media.frames import resize_frames, to_uint8
from magi2.media.image import prepare_reference
from magi2.media.mp4 import write_mp4
from magi2.media.probe import AudioFacts, Probe, VideoFacts, breaches, probe
from magi2.vae import constants, oobleck, tiling, turbo, wan22
from magi2.vae.oobleck import AudioDecoder
from magi2.vae.resample import fourier_resample
from magi2.vae.turbo import TurboDecoder
from magi2.vae.turbo_network import TurboConfig, TurboNetwork
from magi2.vae.wan22 import ImageEncoder
from tests import tolerances
from tests.golden.discovery import matching
from tests.released import RELEASED_TURBO

LAYOUT = r"released_layout\.json"
WAN22 = r"wan22_(\w+)\.cases\.safetensors"
TURBO = r"turbo_(\w+)\.cases\.safetensors"
PLAN = r"turbo_chunk_plan\.json"
OOBLECK = r"oobleck_(\w+)\.cases\.safetensors"
POST = r"post\.cases\.safetensors"
IMAGES = r"image_prep\.json"
MP4 = r"mp4_contract\.json"
FILES = [
    *(LAYOUT, WAN22, TURBO, PLAN, OOBLECK, POST, IMAGES, MP4),
    r"(wan22|turbo)_\w+\.(config\.json|weights\.safetensors)",
    r"(.+/)?oobleck_\w+/(model_config\.json|model\.safetensors)",
    r"image_prep\.cases\.safetensors",
    r"precision\.json",
]


class Case(NamedTuple):
    """One named case of one file."""

    path: Path
    name: str


def golden_cases(golden_dir: Path) -> dict[str, list[Any]]:
    """Find every case of the set."""
    cases: dict[str, list[Any]] = {}

    def collect(fixture: str, file_pattern: str, names: Callable[[Path], list[str]]) -> None:
        found = [
            Case(path, name) for path in matching(golden_dir, "vae", file_pattern) for name in names(path)
        ]
        cases[fixture] = [pytest.param(case, id=f"{case.path.stem}-{case.name}") for case in found]

    collect("layout", LAYOUT, lambda path: list(read_json(path)))
    collect("wan22_constants", WAN22, keyed(r"(latents_mean|latents_std)"))
    collect("wan22_clip", WAN22, keyed(r"(?!dec)(\w+)\.latent"))
    collect("wan22_stage", WAN22, keyed(r"(?!dec)(\w+\.stage\..+)"))
    collect("turbo_constants", TURBO, keyed(r"(latents_mean|latents_std)"))
    collect("turbo_clip", TURBO, keyed(r"(\w+)\.video"))
    collect("turbo_bf16", TURBO, keyed(r"(\w+)\.video_bf16"))
    collect("turbo_whole", TURBO, keyed(r"(\w+)\.whole"))
    collect("turbo_nonfirst", TURBO, keyed(r"(\w+)\.nonfirst_chunk_raw"))
    collect("turbo_stage", TURBO, keyed(r"(\w+\.stage\..+)"))
    collect("plan", PLAN, lambda path: [f"{k}/{n}" for k, plans in read_json(path).items() for n in plans])
    collect("oobleck_clip", OOBLECK, keyed(r"(\w+)\.latent"))
    collect("oobleck_stage", OOBLECK, keyed(r"(\w+\.stage\..+)"))
    collect("resampled", POST, keyed(r"(resample\.\d+)\.in"))
    collect("bytes_of_frames", POST, keyed(r"(uint8\w*)\.in"))
    collect("resized", POST, keyed(r"(resize\.\d+x\d+)\.out"))
    collect("pcm16", POST, keyed(r"(pcm16)\.in"))
    collect("image", IMAGES, lambda path: keyed(r"(\d+x\d+)\.rgb")(image_tensors(path)))
    collect(
        "mp4_size",
        MP4,
        lambda path: [k for k in read_json(path)["required"]["video"] if k.startswith("size_")],
    )
    collect("mp4_contract", MP4, lambda _: ["required"])
    return cases


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def keyed(pattern: str) -> Callable[[Path], list[str]]:
    """Make a finder of the tensors of a file whose whole name fits; a name is what the first group holds."""

    def find(path: Path) -> list[str]:
        with safe_open(path, framework="pt") as file:
            found = (re.fullmatch(pattern, key) for key in sorted(file.keys()))
            return [match.group(1) for match in found if match]

    return find


@cache
def tensors(path: Path) -> Mapping[str, Tensor]:
    return load_file(path)


def image_tensors(path: Path) -> Path:
    return path.with_name("image_prep.cases.safetensors")


def sibling(cases: Path, suffix: str) -> Path:
    return cases.with_name(cases.name.removesuffix(".cases.safetensors") + suffix)


@cache
def image_encoder(cases: Path) -> ImageEncoder:
    """Load the weights beside a case file through the real loader."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / wan22.CHECKPOINT_NAME
        torch.save(dict(tensors(sibling(cases, ".weights.safetensors"))), checkpoint)
        shutil.copy(sibling(cases, ".config.json"), checkpoint.with_name(wan22.CONFIG_NAME))
        return ImageEncoder.load(checkpoint)


@cache
def video_decoder(cases: Path, dtype: torch.dtype = torch.float32) -> TurboDecoder:
    """Load the weights beside a case file, as the averaged ones of a training state."""
    recorded = tensors(sibling(cases, ".weights.safetensors"))
    weights = {f"module.{name}": value for name, value in recorded.items()}
    weights["module.aligned_feature_projection_heads.0.weight"] = torch.zeros(2, 2)
    other = {name: value + 1 for name, value in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        state = {"epoch": 1, "ema_state_dict": weights, "state_dict": other}
        torch.save(state, Path(folder) / turbo.CHECKPOINT_NAME)
        shutil.copy(sibling(cases, ".config.json"), Path(folder) / turbo.CONFIG_NAME)
        return TurboDecoder.load(Path(folder), dtype)


@cache
def audio_decoder(cases: Path) -> AudioDecoder:
    return AudioDecoder.load(sibling(cases, ""))


class Recorder:
    """Keeps what the first call of each named module took and returned."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._hooks = [m.register_forward_hook(self._keeper(name)) for name, m in modules.items()]

    def _keeper(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # Cloned: an activation may work in place on what a module returned.
            self.inputs.setdefault(name, inputs[0].clone())
            self.outputs.setdefault(name, output.clone())

        return keep

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def test_layout_of_the_released_networks(layout: Case) -> None:
    want = {name: tuple(shape) for name, shape in read_json(layout.path)[layout.name].items()}
    assert {
        "wan22_vae": wan22_layout,
        "turbo_vae": turbo_layout,
        "stable_audio_decoder": oobleck_layout,
    }[layout.name]() == {
        name: shape for name, shape in want.items() if layout.name != "wan22_vae" or is_encoder(name)
    }
    assert len(want) == {"wan22_vae": 196, "turbo_vae": 80, "stable_audio_decoder": 182}[layout.name]


def is_encoder(name: str) -> bool:
    return not name.startswith(("decoder.", "conv2."))


def wan22_layout() -> dict[str, tuple[int, ...]]:
    config = wan22.Wan22Config()
    shapes = {name: tuple(value.shape) for name, value in wan22.empty_encoder(config).state_dict().items()}
    names = wan22.encoder_names(config)
    assert set(names.values()) == set(shapes)
    return {theirs: shapes[ours] for theirs, ours in names.items()}


def turbo_layout() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = TurboNetwork(TurboConfig.from_json(RELEASED_TURBO, source="released"))
    return {f"decoder.{name}": tuple(value.shape) for name, value in module.state_dict().items()}


def oobleck_layout() -> dict[str, tuple[int, ...]]:
    config = oobleck.OobleckConfig(channels=128, multiples=(1, 2, 4, 8, 16), strides=(2, 4, 4, 8, 8))
    shapes = {name: tuple(value.shape) for name, value in oobleck.empty_decoder(config).state_dict().items()}
    names = oobleck.decoder_names(len(config.strides))
    assert set(names.values()) == set(shapes)
    # diffusers keeps the numbers of a Snake as [1, C, 1].
    flat = {n: s[1:2] if n.endswith((".alpha", ".beta")) else s for n, s in shapes.items()}
    return {f"pretransform.model.decoder.{theirs}": flat[ours] for theirs, ours in names.items()}


def check_constants(case: Case) -> None:
    want = {"latents_mean": constants.LATENT_MEAN, "latents_std": constants.LATENT_STD}[case.name]
    assert torch.equal(torch.tensor(want), tensors(case.path)[case.name])


def test_image_encoder_uses_the_recorded_constants(wan22_constants: Case) -> None:
    check_constants(wan22_constants)


def test_video_decoder_uses_the_recorded_constants(turbo_constants: Case) -> None:
    check_constants(turbo_constants)


def test_image_encoder_returns_the_recorded_latent(wan22_clip: Case) -> None:
    case, encoder = tensors(wan22_clip.path), image_encoder(wan22_clip.path)
    with Recorder({"moments": encoder.module.quant_conv}) as record:
        latent = encoder.encode(case[f"{wan22_clip.name}.pixels"])
    moments = case[f"{wan22_clip.name}.moments"]
    torch.testing.assert_close(record.outputs["moments"], moments, **tolerances.WAN22_ENCODE)
    torch.testing.assert_close(latent, case[f"{wan22_clip.name}.latent"], **tolerances.WAN22_ENCODE)


def test_stage_of_the_image_encoder_returns_the_recorded_values(wan22_stage: Case) -> None:
    name, stage = wan22_stage.name.split(".stage.")
    encoder = image_encoder(wan22_stage.path)
    network: Any = encoder.module.encoder
    middle = network.mid_block
    stages = {f"down{level}": block for level, block in enumerate(network.down_blocks)}
    stages |= {"conv1": network.conv_in, "middle0": middle.resnets[0], "middle1": middle.attentions[0]}
    stages |= {"middle2": middle.resnets[1]}
    with Recorder({stage: stages[stage]}) as record:
        encoder.encode(tensors(wan22_stage.path)[f"{name}.pixels"])
    want = tensors(wan22_stage.path)[wan22_stage.name]
    torch.testing.assert_close(record.outputs[stage], want, **tolerances.WAN22_ENCODE)


def test_windowed_decode_returns_the_recorded_video(turbo_clip: Case) -> None:
    case, decoder = tensors(turbo_clip.path), video_decoder(turbo_clip.path)
    video = decoder.decode_float(case[f"{turbo_clip.name}.latent"])
    torch.testing.assert_close(video, case[f"{turbo_clip.name}.video"], **tolerances.TURBO_FP32)


def test_decoded_bytes_are_those_of_the_recorded_video(turbo_clip: Case) -> None:
    case, decoder = tensors(turbo_clip.path), video_decoder(turbo_clip.path)
    frames = torch.cat(list(decoder.decode(case[f"{turbo_clip.name}.latent"])))
    want = to_uint8(case[f"{turbo_clip.name}.video"])
    # A value at a border between two bytes may fall on the other side.
    assert (frames.int() - want.int()).abs().max() <= 1
    assert (frames == want).float().mean() >= tolerances.RESIZED_FRAMES_EQUAL


def test_decode_in_bf16_stays_near_the_recorded_video(turbo_bf16: Case) -> None:
    case, decoder = tensors(turbo_bf16.path), video_decoder(turbo_bf16.path, torch.bfloat16)
    video = decoder.decode_float(case[f"{turbo_bf16.name}.latent"])
    assert video.dtype == torch.bfloat16
    difference = (video.float() - case[f"{turbo_bf16.name}.video"]).abs()
    assert difference.mean() <= tolerances.TURBO_BF16_MEAN
    assert difference.max() <= tolerances.TURBO_BF16_MAX


@torch.no_grad()
def test_network_without_windows_returns_the_recorded_whole_clip(turbo_whole: Case) -> None:
    case, decoder = tensors(turbo_whole.path), video_decoder(turbo_whole.path)
    latent = constants.denormalize(case[f"{turbo_whole.name}.latent"])
    whole = case[f"{turbo_whole.name}.whole"]
    torch.testing.assert_close(decoder.module(latent, is_first=True), whole, **tolerances.TURBO_FP32)
    # The product's function is another one.
    assert (decoder.decode_float(case[f"{turbo_whole.name}.latent"]) - whole).abs().max() > 0.1


@torch.no_grad()
def test_later_window_makes_four_frames_of_each_latent(turbo_nonfirst: Case) -> None:
    case, decoder = tensors(turbo_nonfirst.path), video_decoder(turbo_nonfirst.path)
    prepared = decoder.prepare(case[f"{turbo_nonfirst.name}.latent"])
    want = case[f"{turbo_nonfirst.name}.nonfirst_chunk_raw"]
    torch.testing.assert_close(decoder.module(prepared, is_first=False), want, **tolerances.TURBO_FP32)


def test_stage_of_the_video_decoder_returns_the_recorded_values(turbo_stage: Case) -> None:
    name, stage = turbo_stage.name.split(".stage.")
    case, decoder = tensors(turbo_stage.path), video_decoder(turbo_stage.path)
    latent = case[f"{name}.latent"]
    with Recorder(turbo_stages(decoder.module)) as record:
        decoder.decode_float(latent)
    got = record.outputs | {
        "denorm_padded": decoder.prepare(latent),
        "conv_out_input": record.inputs["conv_out"],
    }
    torch.testing.assert_close(got[stage], case[turbo_stage.name], **tolerances.TURBO_FP32)


def turbo_stages(network: TurboNetwork) -> dict[str, nn.Module]:
    stages: dict[str, nn.Module] = {
        "conv_in": network.conv_in,
        "mid_block": network.mid_block,
        "conv_out": network.conv_out,
    }
    for index, block in enumerate(network.up_blocks):
        stages[f"up_block{index}"] = block
        if hasattr(block, "upsamplers"):
            stages[f"up_block{index}.upsampler"] = block.upsamplers[0]
    return stages


def test_window_plan_is_the_recorded_one(plan: Case) -> None:
    shape, num_latents = plan.name.split("/")
    first, step = map(int, re.fullmatch(r"first(\d+)_step(\d+)", shape).groups())
    want = read_json(plan.path)[shape][num_latents]
    windows = tiling.plan_windows(int(num_latents), first, step)
    last = int(num_latents) - 1
    got = [
        {
            "latent_frames": [min(index, last) for index in range(window.start, window.stop)],
            "is_first_chunk": window.is_first,
            "kept_output_frames": [window.keep_start, window.keep_stop] if window.num_kept else [],
        }
        for window in windows
    ]
    assert got == want["chunks"]
    assert sum(window.num_kept for window in windows) == want["output_frames"]
    assert tiling.num_frames(int(num_latents)) == want["output_frames"]


def test_audio_decoder_returns_the_recorded_waveform(oobleck_clip: Case) -> None:
    case, decoder = tensors(oobleck_clip.path), audio_decoder(oobleck_clip.path)
    waveform = decoder.decode(case[f"{oobleck_clip.name}.latent"].unsqueeze(0))
    torch.testing.assert_close(waveform, case[f"{oobleck_clip.name}.waveform"], **tolerances.OOBLECK)
    resampled = fourier_resample(waveform)[0].T
    torch.testing.assert_close(resampled, case[f"{oobleck_clip.name}.audio_44k1"], **tolerances.OOBLECK)


def test_stage_of_the_audio_decoder_returns_the_recorded_values(oobleck_stage: Case) -> None:
    name, stage = oobleck_stage.name.split(".stage.")
    decoder = audio_decoder(oobleck_stage.path)
    network: Any = decoder.module
    modules = [network.conv1, *network.block, network.snake1, network.conv2]
    stages = {f"layers.{index}": module for index, module in enumerate(modules)}
    with Recorder({stage: stages[stage]}) as record:
        decoder.decode(tensors(oobleck_stage.path)[f"{name}.latent"].unsqueeze(0))
    want = tensors(oobleck_stage.path)[oobleck_stage.name]
    torch.testing.assert_close(record.outputs[stage], want, **tolerances.OOBLECK)


def test_resampling_returns_the_recorded_samples(resampled: Case) -> None:
    case = tensors(resampled.path)
    got = fourier_resample(case[f"{resampled.name}.in"].T).T
    torch.testing.assert_close(got, case[f"{resampled.name}.out"], **tolerances.RESAMPLE)


def test_video_becomes_the_recorded_bytes(bytes_of_frames: Case) -> None:
    case = tensors(bytes_of_frames.path)
    assert torch.equal(to_uint8(case[f"{bytes_of_frames.name}.in"]), case[f"{bytes_of_frames.name}.out"])


def test_resized_frames_are_the_recorded_ones(resized: Case) -> None:
    case = tensors(resized.path)
    width, height = map(int, resized.name.removeprefix("resize.").split("x"))
    got, want = resize_frames(case["uint8.out"], width, height), case[f"{resized.name}.out"]
    assert got.shape == want.shape
    assert (got.int() - want.int()).abs().max() <= tolerances.RESIZED_FRAMES


def test_sixteen_bit_samples_are_the_recorded_ones(pcm16: Case) -> None:
    case = tensors(pcm16.path)
    got = (case[f"{pcm16.name}.in"] * 32768).floor().clamp(-32768, 32767).to(torch.int16)
    assert torch.equal(got, case[f"{pcm16.name}.out"])


def test_reference_image_becomes_the_recorded_pixels(image: Case) -> None:
    case, sizes = tensors(image_tensors(image.path)), read_json(image.path)
    picture = Image.fromarray(case[f"{image.name}.rgb"].numpy())
    pixels = prepare_reference(picture, sizes["generation_width"], sizes["generation_height"])
    assert torch.equal(pixels, case[f"{image.name}.pixels"])


def test_written_clip_has_the_required_facts(mp4_size: Case, tmp_path: Path) -> None:
    required = read_json(mp4_size.path)["required"]
    width, height = required["video"][mp4_size.name]
    tier = TIERS[mp4_size.name.removeprefix("size_")]
    assert (tier.width, tier.height) == (width, height)
    path = tmp_path / "clip.mp4"
    frames = torch.arange(125 * 3, dtype=torch.int64).view(125, 1, 1, 3).remainder(256).to(torch.uint8)
    clip = Clip(frames.expand(125, height, width, 3), torch.zeros(441_000, 2))
    write_mp4(path, clip, preset="ultrafast")
    facts = probe(path)
    assert recorded_form(facts, width, height) == required | {
        "video": {**required["video"], mp4_size.name: [width, height]}
    }
    assert breaches(facts, width, height) == []


def recorded_form(facts: Probe, width: int, height: int) -> dict[str, Any]:
    """Say what a probe found in the words of the contract's file; both tiers' sizes stand in there."""
    video, audio = facts.video, facts.audio
    assert video is not None
    assert audio is not None
    assert (video.width, video.height) == (width, height)
    assert "mp4" in facts.format_names
    return {
        "container": {"format": "mp4", "duration_us": facts.duration_us, "streams": len(facts.codec_types)},
        "video": {
            "codec": video.codec_name,
            "pix_fmt": video.pix_fmt,
            "avg_frame_rate": str(video.avg_frame_rate),
            "nb_frames": video.nb_frames,
            "duration_s": video.duration_s,
            "start_time": video.start_time_s,
            **{f"size_{tier.name}": [tier.width, tier.height] for tier in TIERS.values()},
        },
        "audio": {
            "codec": audio.codec_name,
            "profile": audio.profile,
            "sample_rate": audio.sample_rate,
            "channels": audio.channels,
            "layout": audio.layout,
            "duration_ts": audio.num_samples,
            "time_base": f"1/{audio.sample_rate}",
            "start_time": audio.start_time_s,
        },
    }


def test_each_required_fact_of_the_contract_is_enforced(mp4_contract: Case) -> None:
    required = read_json(mp4_contract.path)[mp4_contract.name]
    video, audio = required["video"], required["audio"]
    width, height = video["size_272p"]
    good = Probe(
        format_names=(required["container"]["format"],),
        major_brand="isom",
        duration_us=required["container"]["duration_us"],
        size_bytes=1,
        is_faststart=True,
        codec_types=("video", "audio"),
        video=VideoFacts(
            codec_name=video["codec"],
            profile="High",
            pix_fmt=video["pix_fmt"],
            width=width,
            height=height,
            avg_frame_rate=Fraction(video["avg_frame_rate"]),
            nb_frames=video["nb_frames"],
            start_time_s=float(video["start_time"]),
            duration_s=video["duration_s"],
            color_space="smpte170m",
            color_primaries="smpte170m",
            color_transfer="smpte170m",
            color_range="tv",
        ),
        audio=AudioFacts(
            codec_name=audio["codec"],
            profile=audio["profile"],
            sample_rate=audio["sample_rate"],
            channels=audio["channels"],
            layout=audio["layout"],
            num_samples=audio["duration_ts"],
            start_time_s=float(audio["start_time"]),
            duration_s=10.0,
        ),
    )
    assert len(good.codec_types) == required["container"]["streams"]
    assert breaches(good, width, height) == []
    for change in ({"format_names": ("matroska",)}, {"duration_us": 9_900_000}, {"codec_types": ("video",)}):
        assert len(breaches(replace(good, **change), width, height)) == 1
    for field, wrong in _WRONG_VIDEO.items():
        assert len(breaches(replace(good, video=replace(good.video, **{field: wrong})), width, height)) == 1
    for field, wrong in _WRONG_AUDIO.items():
        assert len(breaches(replace(good, audio=replace(good.audio, **{field: wrong})), width, height)) == 1


_WRONG_VIDEO: dict[str, Any] = {
    "codec_name": "hevc",
    "pix_fmt": "yuv444p",
    "width": 450,
    "height": 258,
    "avg_frame_rate": Fraction(25),
    "nb_frames": 124,
    "start_time_s": 0.08,
    "duration_s": 9.92,
    "color_space": "bt709",
    "color_range": "pc",
}
_WRONG_AUDIO: dict[str, Any] = {
    "codec_name": "mp3",
    "profile": "HE-AAC",
    "sample_rate": 48_000,
    "channels": 1,
    "layout": "mono",
    "num_samples": 441_344,
    "start_time_s": -0.02,
}
