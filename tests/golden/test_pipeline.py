"""All around the transformer against the reference: text, schedule, guidance, loop, noise, images, frames.

Cases are found by file name at any depth; steps, shifts, prompts, sizes and lengths are read from the
files. Of `cfg.safetensors` only the setting `released`, of `text.json` neither `pe_markdown` nor
`image_paths`: the product has no such knobs. The packed batches have a module of their own,
`test_packing`.
"""

import ast
import hashlib
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from magi2 import packing
from magi2.caption import add_reference_marker, normalise
from magi2.config import SamplingConfig
from magi2.contract import MIN_IMAGE_SIDE, TIERS, ImageFacts, image_problems
from magi2.errors import InvalidInput
from magi2.media.frames import resize_frames, to_uint8
from magi2.media.image import canvas_size, letterbox, pixel_size, prepare_reference
from magi2.packing import TEXT, Conditioning, PackedBatch
from magi2.sampling.guidance import guide
from magi2.sampling.loop import denoise
from magi2.sampling.noise import draw_noise
from magi2.sampling.unipc import FlowUniPC, schedule
from magi2.text.negative import NEGATIVE_PROMPT
from magi2.text.prompt import encoder_text
from magi2.text.qwen35 import TextEncoder
from magi2.text.tokenizer import figure_tokens
from tests import tolerances
from tests.golden.discovery import matching
from tests.golden.test_packing import dense_rows, dense_time, references

ENCODER = "tiny_text_encoder"
NEGATIVE = r"negative_prompt\.txt"
TEXTS = r"text\.json"
IDS = r"tokenizer_ids\.json"
FEATURES = r"tiny_text_features\.json"
SCHEDULER = r"scheduler\.safetensors"
GUIDANCE = r"cfg\.safetensors"
LOOP = r"loop_.+_n\d+\.safetensors"
NOISE = r"noise_cpu\.json"
IMAGES = r"image_transform\.json"
FRAMES = r"postprocess\.safetensors"
FILES = [
    *(NEGATIVE, TEXTS, IDS, FEATURES, SCHEDULER, GUIDANCE, LOOP, NOISE, IMAGES, FRAMES),
    r"tiny_text_features\.safetensors",
    r"image_transform\.safetensors",
    rf"(.+/)?{ENCODER}/.+",
]

# The reference's cap; the product refuses such a prompt instead.
REFERENCE_TOKEN_CAP = 7000


class Case(NamedTuple):
    """One entry of a file: where it stands, its name there, and its value."""

    path: Path
    name: str
    value: Any


class Run(NamedTuple):
    """One sampler run of a scheduler file: key prefix, number of steps and shift."""

    path: Path
    prefix: str
    num_steps: int
    shift: float


def golden_cases(golden_dir: Path) -> dict[str, list[Any]]:
    texts = entries(golden_dir, TEXTS)
    images = entries(golden_dir, IMAGES)
    runs = [run for path in matching(golden_dir, "pipeline", SCHEDULER) for run in runs_of(path)]
    feature_files = matching(golden_dir, "pipeline", FEATURES)
    return {
        "negative_path": matching(golden_dir, "pipeline", NEGATIVE),
        "normalised": params(c for c in texts if c.name.startswith("normalize.")),
        "marked": params(c for c in texts if c.name.startswith("figure.")),
        "tokenized": params(c for path in matching(golden_dir, "pipeline", IDS) for c in tokenized(path)),
        "encoded": params(c for path in feature_files for c in listed(path, "prompts", read_json(path))),
        "truncated": params(c for path in feature_files for c in truncations(path)),
        "run": [pytest.param(run, id=run.prefix) for run in runs],
        "states": [pytest.param((run, m), id=f"{run.prefix}.{m}") for run in runs for m in modalities(run)],
        "guidance_path": matching(golden_dir, "pipeline", GUIDANCE),
        "loop_path": [pytest.param(p, id=p.stem) for p in matching(golden_dir, "pipeline", LOOP)],
        "noise": params(entries(golden_dir, NOISE)),
        "small_image": params(c for c in images if c.name.startswith("images.")),
        "image_size": params(c for c in images if c.name.startswith("table.")),
        "big_image": params(c for c in images if c.name.startswith("big.")),
        "frames_path": matching(golden_dir, "pipeline", FRAMES),
        "resized": params(c for path in matching(golden_dir, "pipeline", FRAMES) for c in resizes(path)),
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def params(cases: Any) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


def listed(path: Path, name: str, content: dict[str, Any]) -> list[Case]:
    """The entries of one member of a file, which is a list or an object."""
    value = content.get(name, [])
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [Case(path, f"{name}.{key}", entry) for key, entry in pairs]


def entries(golden_dir: Path, pattern: str) -> list[Case]:
    """What the files hold: entries of their lists and objects; for the noise file the members themselves."""
    found = []
    for path in matching(golden_dir, "pipeline", pattern):
        content = read_json(path)
        if pattern == NOISE:
            found += [Case(path, name, value) for name, value in content.items()]
        else:
            found += [
                c
                for name, v in content.items()
                if not isinstance(v, str)
                for c in listed(path, name, content)
            ]
    return found


def tokenized(path: Path) -> list[Case]:
    content = read_json(path)
    pairs = zip(content["prompts"], content["ids"], strict=True)
    return [Case(path, f"prompt{k}", pair) for k, pair in enumerate(pairs)]


def truncations(path: Path) -> list[Case]:
    content = read_json(path)
    return [Case(path, "truncation", content["truncation"])] if "truncation" in content else []


def runs_of(path: Path) -> list[Run]:
    """The runs of a scheduler file: `n{N}.` at the shift of the metadata, and `shift{S}.n{N}.`."""
    with safe_open(path, framework="pt") as file:
        usual = float(file.metadata()["shift"])
    found = [re.fullmatch(r"((?:shift([\d.]+)\.)?n(\d+))\.timesteps", key) for key in load_file(path)]
    return [Run(path, m[1], int(m[3]), float(m[2]) if m[2] else usual) for m in found if m]


def modalities(run: Run) -> list[str]:
    found = [re.fullmatch(re.escape(run.prefix) + r"\.([a-z]+)\.v", key) for key in load_file(run.path)]
    return [m[1] for m in found if m]


def resizes(path: Path) -> list[Case]:
    found = [re.fullmatch(r"resized_(\d+)x(\d+)", key) for key in load_file(path)]
    return [Case(path, m[0], m.groups()) for m in found if m]


@cache
def encoder(directory: Path, dtype: torch.dtype) -> TextEncoder:
    return TextEncoder.load(directory, dtype, "cpu")


def test_negative_prompt_equals_the_recorded_bytes(negative_path: Path) -> None:
    assert NEGATIVE_PROMPT.encode() == negative_path.read_bytes()


def test_prompt_normalises_as_recorded(normalised: Case) -> None:
    assert normalise(normalised.value["in"]) == normalised.value["out"]


def test_image_marker_is_added_and_normalised_as_recorded(marked: Case) -> None:
    with_reference = add_reference_marker(marked.value["in"])
    assert with_reference == marked.value["with_reference"]
    assert normalise(with_reference) == marked.value["normalized"]
    assert encoder_text(marked.value["in"], has_image=True) == marked.value["normalized"]


def test_tokenizer_gives_the_recorded_ids(tokenized: Case) -> None:
    prompt, ids = tokenized.value
    tower = encoder(tokenized.path.parent / ENCODER, torch.bfloat16)
    assert list(tower.tokenizer.tokenize(prompt).ids) == ids


def test_encoder_gives_the_recorded_tokens_and_figure(encoded: Case) -> None:
    tower = encoder(encoded.path.parent / ENCODER, torch.bfloat16)
    text = encoder_text(encoded.value["prompt"], has_image=False)
    assert text == encoded.value["normalized"]
    tokens = tower.tokenizer.tokenize_prompt(text)
    assert list(tokens.ids) == encoded.value["input_ids"]
    assert figure_tokens(tokens.offsets, text) == (encoded.value["figure_token_indices"] or [])


def test_encoder_features_in_fp32_equal_the_recorded(encoded: Case) -> None:
    want = features_of(encoded, "features_fp32")
    tower = encoder(encoded.path.parent / ENCODER, torch.float32)
    got = tower.encode(encoded.value["normalized"]).features[0]
    torch.testing.assert_close(got, want, **tolerances.TEXT_FEATURES_FP32)


def test_encoder_features_and_special_token_in_bf16_equal_the_recorded(encoded: Case) -> None:
    tower = encoder(encoded.path.parent / ENCODER, torch.bfloat16)
    text = encoded.value["normalized"]
    got = tower.encode(text)
    special = tower.special_token(got, text)
    want, want_special = features_of(encoded, "features"), features_of(encoded, "special")
    assert got.features.dtype == special.dtype == torch.bfloat16
    assert relative_error(got.features[0], want) <= tolerances.TEXT_FEATURES_BF16_RELATIVE
    assert relative_error(special[0, 0], want_special) <= tolerances.TEXT_FEATURES_BF16_RELATIVE


def features_of(case: Case, name: str) -> Tensor:
    index = case.name.removeprefix("prompts.")
    return load_file(case.path.with_suffix(".safetensors"))[f"p{index}.{name}"]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what was wanted; the plain norm where that is zero."""
    return float((got.float() - want.float()).norm() / (want.float().norm() or 1.0))


def test_text_beyond_the_reference_cap_has_the_recorded_length_and_figure(truncated: Case) -> None:
    text = text_of_rule(ast.parse(truncated.value["prompt_rule"], mode="eval").body)
    tokens = encoder(truncated.path.parent / ENCODER, torch.bfloat16).tokenizer.tokenize(text)
    assert len(tokens.ids) == truncated.value["untruncated"]
    kept = tokens.offsets[:REFERENCE_TOKEN_CAP]
    assert len(kept) == truncated.value["kept"]
    assert figure_tokens(kept, text) == truncated.value["figure_token_indices"]


def text_of_rule(node: ast.expr) -> Any:
    """Work out sums and repetitions of quoted texts, such as 'snow ' * 7005 + '<Figure 1>'."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = text_of_rule(node.left), text_of_rule(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    return ast.literal_eval(node)


def test_schedule_equals_the_recorded(run: Run) -> None:
    tensors = load_file(run.path)
    plan = schedule(run.num_steps, run.shift)
    assert list(plan.timesteps) == tensors[f"{run.prefix}.timesteps"].tolist()
    assert torch.equal(plan.sigmas, tensors[f"{run.prefix}.sigmas"])


def test_solver_states_equal_the_recorded(states: tuple[Run, str]) -> None:
    run, modality = states
    tensors = load_file(run.path)
    velocities, want = (tensors[f"{run.prefix}.{modality}.{name}"] for name in ("v", "x"))
    solver = FlowUniPC(schedule(run.num_steps, run.shift))
    state = want[0]
    for velocity, following in zip(velocities, want[1:], strict=True):
        state = solver.step(velocity, state)
        torch.testing.assert_close(state, following, **tolerances.SOLVER_STATES)


def test_guidance_equals_the_released_setting(guidance_path: Path) -> None:
    tensors = load_file(guidance_path)
    scales = SamplingConfig()
    assert tensors["released.video_scale"].tolist() == [scales.video_guidance]
    video = guide(tensors["video_pred"], scales.video_guidance)
    audio = guide(tensors["audio_pred"], scales.audio_guidance)
    torch.testing.assert_close(video, tensors["released.video"], **tolerances.GUIDANCE)
    torch.testing.assert_close(audio, tensors["released.audio"], **tolerances.GUIDANCE)


class StandIn:
    """The stand-in transformer of the loop files, behind real packing; keeps each state that it was shown."""

    def __init__(self, conditioning: Conditioning) -> None:
        self.conditioning = conditioning
        self.states: list[tuple[Tensor, Tensor]] = []

    def predict(self, video: Tensor, audio: Tensor, timestep: int) -> tuple[Tensor, Tensor]:
        self.states.append((video, audio))
        batch = packing.pack(video, audio, self.conditioning)
        return packing.unpack(stand_in_output(batch, timestep), batch)


def stand_in_output(batch: PackedBatch, timestep: int) -> Tensor:
    x = dense_rows(batch)[:, :64]
    out = 0.6 * x + 0.1 * dense_time(batch, timestep, 64) + 0.001 * batch.coords.sum(dim=1, keepdim=True)
    bounds = batch.segment_bounds
    for start, stop in pairwise(bounds):
        out[start:stop] += 0.02 * x[start:stop][batch.modality[start:stop] == TEXT].mean(dim=0)
    return out


def test_denoising_loop_follows_the_recorded_trajectory(loop_path: Path) -> None:
    tensors = load_file(loop_path)
    conditioning = Conditioning((tensors["txt"], tensors["null_txt"]), references(tensors))
    stand_in = StandIn(conditioning)
    num_steps = tensors["traj_video"].shape[0] - 1
    latents = denoise(
        stand_in, tensors["latent"], tensors["audio_latent"], num_steps=num_steps, sampling=SamplingConfig()
    )
    states = [*stand_in.states, (latents.video, latents.audio)]
    for k, (video, audio) in enumerate(states):
        torch.testing.assert_close(video, tensors["traj_video"][k], **tolerances.LOOP_STATES)
        torch.testing.assert_close(audio, tensors["traj_audio"][k], **tolerances.LOOP_STATES)
    assert len(states) == num_steps + 1
    torch.testing.assert_close(latents.video, tensors["final_video"], **tolerances.LOOP_STATES)
    torch.testing.assert_close(latents.audio, tensors["final_audio"], **tolerances.LOOP_STATES)


def test_noise_of_the_cpu_generator_equals_the_recorded_samples(noise: Case) -> None:
    tier, seed = re.fullmatch(r"(\w+)\.seed(\d+)", noise.name).groups()
    want = noise.value
    drawn = draw_noise(int(seed), TIERS[tier], "cpu")
    assert list(drawn.video.shape) == want["video_shape"]
    assert list(drawn.audio.shape) == want["audio_shape"]
    video, audio = drawn.video.flatten(), drawn.audio.flatten()
    positions = [int(k) for k in want["video_strided"]]
    pairs = [
        (video[:8], want["video_first8"]),
        (video[positions], list(want["video_strided"].values())),
        (audio[:8], want["audio_first8"]),
        (audio[-8:], want["audio_last8"]),
    ]
    for got, samples in pairs:
        torch.testing.assert_close(got, torch.tensor(samples), **tolerances.NOISE)


def test_small_image_becomes_the_recorded_canvas_and_pixels(small_image: Case) -> None:
    tensors = load_file(small_image.path.with_suffix(".safetensors"))
    name, sizes = small_image.name.removeprefix("images."), small_image.value
    image = Image.fromarray(tensors[f"{name}.input"].numpy())
    assert list(image.size) == sizes["input_wh"]
    height, width = sizes["generation_hw"]
    canvas = letterbox(image, width, height)
    pixels = prepare_reference(image, width, height)
    assert list(canvas.size) == sizes["canvas_wh"]
    assert torch.equal(torch.from_numpy(np.array(canvas)), tensors[f"{name}.canvas"])
    assert list(pixels.shape) == sizes["pixels_shape"]
    assert torch.equal(pixels, tensors[f"{name}.pixels"].float())
    assert [side // 16 for side in pixels.shape[-2:]] == sizes["latent_grid"]


def test_image_size_leads_to_the_recorded_sizes_or_is_refused(image_size: Case) -> None:
    want = image_size.value
    height, width = want["generation_hw"]
    if "error" in want:  # the reference fails in the middle
        with pytest.raises(InvalidInput, match="too elongated"):
            pixel_size(*want["input_wh"], width, height)
        return
    pixels_width, pixels_height = pixel_size(*want["input_wh"], width, height)
    assert list(canvas_size(*want["input_wh"], width, height)) == want["canvas_wh"]
    assert [pixels_height, pixels_width] == want["pixels_hw"]
    assert [pixels_height // 16, pixels_width // 16] == want["latent_grid"]


def test_contract_refuses_just_the_images_that_cannot_be_transformed_or_are_tiny(image_size: Case) -> None:
    height, width = image_size.value["generation_hw"]
    tier = next(t.name for t in TIERS.values() if (t.width, t.height) == (width, height))
    image = ImageFacts(*image_size.value["input_wh"])
    want = {"image_aspect"} if "error" in image_size.value else set()
    if min(image.width, image.height) < MIN_IMAGE_SIDE:
        want.add("image_too_small")
    assert {p.code for p in image_problems([image], tier)} == want


def formula_image(width: int, height: int, k: int) -> np.ndarray[Any, Any]:
    """The input of the big cases, as the file's `big_input_formula` says."""
    x, y = np.arange(width, dtype=np.float64)[None, :], np.arange(height, dtype=np.float64)[:, None]
    red = 127.5 + 127.5 * np.sin(x * (0.11 + 0.02 * k) + y * 0.05)
    green = 255 * x / (width - 1) + 0 * y
    blue = 127.5 + 127.5 * np.cos(y * 0.13 - x * 0.03 * k)
    pixels = np.clip(np.rint(np.stack([red, green, blue], axis=-1)), 0, 255).astype(np.uint8)
    pixels[(x // 7 + y // 5) % 9 == 0] = (250, 20, 30)
    return pixels


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_big_image_becomes_the_recorded_canvas_and_pixels(big_image: Case) -> None:
    want = big_image.value
    height, width = want["generation_hw"]
    array = formula_image(*want["input_wh"], want["input_k"])
    assert digest(array) == want["input_sha256"]
    image = Image.fromarray(array)
    canvas = letterbox(image, width, height)
    pixels = prepare_reference(image, width, height)
    assert list(canvas.size) == want["canvas_wh"]
    assert digest(np.array(canvas)) == want["canvas_sha256"]
    assert list(pixels.shape) == want["pixels_shape"]
    assert digest(pixels.numpy()) == want["pixels_f32_sha256"]
    for position, value in want["sample"].items():
        channel, row, column = map(int, position.split(","))
        assert pixels[0, channel, 0, row, column].item() == value


def test_decoded_video_becomes_the_recorded_frames(frames_path: Path) -> None:
    tensors = load_file(frames_path)
    assert torch.equal(to_uint8(tensors["decoded"]), tensors["frames"])


def test_frames_resize_to_the_recorded_ones(resized: Case) -> None:
    tensors = load_file(resized.path)
    width, height = map(int, resized.value)
    got, want = resize_frames(tensors["frames"], width, height), tensors[resized.name]
    difference = (got.int() - want.int()).abs()
    assert got.shape == want.shape
    assert difference.max() <= tolerances.RESIZED_FRAMES
    assert (difference == 0).float().mean() >= tolerances.RESIZED_FRAMES_EQUAL
