"""The transformer on CUDA: stored numbers, a model that fits the kernels' tiles, strict determinism."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from magi2 import packing
from magi2.config import ModelConfig
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.packing import PackedBatch
from tests import tolerances
from tests.golden.dit_cases import batch_of, load_model, read_case
from tests.unit.magi2.model.tiny import conditioning, latents, random_model, seeded, small_config

GOLDEN = Path(__file__).parents[2] / "golden" / "dit"
FULL = sorted(path for path in GOLDEN.glob("full_*.safetensors") if "_pad" not in path.name)


@pytest.fixture(autouse=True)
def _true_fp32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    names = ("video", "audio", "text", "coords", "modality", "cu_seqlens")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def run_golden(path: Path, precision: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return our generated rows and the stored ones."""
    case = read_case(path)
    model = deepcopy(load_model(path.parent, precision)).to(device)
    batch = moved(batch_of(case, model.config), device)
    time_row = case.tensors["in.time_token_sequence"][0].to(device)
    out = model(model.prepare(batch), batch.video, batch.audio, time_row).cpu()
    rows = [torch.arange(p.start, p.stop) for p in batch.parts if p.kind.is_generated]
    return out[torch.cat(rows)], case.of(precision)["out"][torch.cat(rows)]


@pytest.mark.parametrize("path", FULL, ids=lambda p: p.stem)
def test_fp32_forward_equals_the_reference(device: torch.device, path: Path) -> None:
    dispatch.clear_report()
    got, want = run_golden(path, "fp32", device)
    torch.testing.assert_close(got, want, **tolerances.DIT_FP32)
    assert dispatch.report()["attention"] == ("efficient",)


@pytest.mark.parametrize("path", FULL, ids=lambda p: p.stem)
def test_bf16_forward_is_near_the_reference(device: torch.device, path: Path) -> None:
    dispatch.clear_report()
    got, want = run_golden(path, "bf16", device)
    per_token = (got - want).norm(dim=1) / want.norm(dim=1)
    assert float(per_token.median()) <= tolerances.DIT_BF16_MEDIAN_TOKEN
    assert float((got - want).norm() / want.norm()) <= tolerances.DIT_BF16_FORWARD
    assert dispatch.report()["attention"] in {("cudnn",), ("flash2",)}


def fitting_config() -> ModelConfig:
    """Head width 128, MoE head width 256, 8 experts: sizes that fit the kernels' tiles."""
    small = small_config()
    moe = replace(
        small.moe,
        num_heads=2,
        num_experts=8,
        expert_width=128,
        shared_width=128,
        modality_width=128,
        routed_width=512,
    )
    return replace(small, hidden_size=512, head_dim=128, num_query_groups=4, moe=moe)


def spread_model(config: ModelConfig) -> Magi2Transformer:
    """Weights small enough for the wider sums, so that activations stay in range."""
    model = random_model(config)
    for name, tensor in model.state_dict().items():
        if tensor.ndim > 1 and "mhc_bias" not in name:
            tensor.mul_(0.3)
    return model


@pytest.mark.parametrize("softcap", [-1.0, 5.0])
def test_fp32_prediction_equals_the_cpu(device: torch.device, softcap: float) -> None:
    model = spread_model(replace(fitting_config(), attn_softcap=softcap))
    want = TransformerDenoiser(model, conditioning(num_images=1)).predict(*latents(), 437)
    denoiser = TransformerDenoiser(deepcopy(model).to(device), conditioning(num_images=1))
    got = denoiser.predict(*(x.to(device) for x in latents()), 437)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **tolerances.DIT_FP32)


def test_bf16_attention_and_dense_layers_are_near_fp32(device: torch.device) -> None:
    # Without a mixture no expert choice can flip, so the whole forward stays near.
    config = replace(fitting_config(), moe=replace(fitting_config().moe, layers=()))
    model = spread_model(config)
    want = TransformerDenoiser(model, conditioning()).predict(*latents(), 437)
    rounded = Magi2Transformer(config.with_dtype("bfloat16"))
    rounded.load_state_dict(model.state_dict())
    denoiser = TransformerDenoiser(rounded.to(device), conditioning())
    got = denoiser.predict(*(x.to(device) for x in latents()), 437)
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) <= tolerances.DIT_BF16_DENSE_FORWARD


STRICT = """
import torch
from magi2.determinism import configure
configure(deterministic=True)
from magi2.model.denoiser import TransformerDenoiser
from tests.unit.magi2.model.tiny import conditioning, latents, random_model, small_config
model = random_model(small_config(params_dtype="bfloat16")).to("cuda")
runs = []
for _ in range(2):
    denoiser = TransformerDenoiser(model, conditioning(num_images=1))
    runs.append(denoiser.predict(*(x.to("cuda") for x in latents()), 5))
print(all(torch.equal(a, b) for a, b in zip(*runs)))
"""


@pytest.mark.usefixtures("device")
def test_strict_determinism_allows_every_operation_of_the_model() -> None:
    done = subprocess.run([sys.executable, "-c", STRICT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_released_layers_fit_at_540p(device: torch.device) -> None:
    # One layer of each kind at the released width, 117,638 tokens: 7 GB of weights, 2.9 GB of streams.
    released = ModelConfig.released()
    config = replace(released, num_layers=2, mm_layers=(0,), moe=replace(released.moe, layers=(1,)))
    with device:
        model = Magi2Transformer(config)
    for name, tensor in model.state_dict().items():
        tensor.normal_(0, 0.02) if not name.endswith("bands") else tensor.fill_(0.1)
    text = (seeded(1, 2000, 5120), seeded(1, 450, 5120))
    denoiser = TransformerDenoiser(model, packing.Conditioning(text))
    video, audio = seeded(1, 48, 32, 32, 56).to(device), seeded(1, 250, 64).to(device)
    torch.cuda.reset_peak_memory_stats()
    predicted, _ = denoiser.predict(video, audio, 500)
    assert bool(predicted.isfinite().all())
    assert torch.cuda.max_memory_allocated() <= 40e9
