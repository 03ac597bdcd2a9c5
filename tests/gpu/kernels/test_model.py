"""A model whose sizes the fused kernels take: which of them ran, and that they change only rounding."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from magi2.config import ModelConfig
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from tests import tolerances
from tests.unit.magi2.model.tiny import conditioning, latents, random_model, small_config


def fitting_config() -> ModelConfig:
    """Head width 128, MoE head width 256, 8 experts, four streams."""
    small = small_config()
    moe = replace(
        small.moe,
        num_heads=2,
        num_experts=8,
        top_k=8,  # every expert: no choice can flip between two runs
        expert_width=128,
        shared_width=128,
        modality_width=128,
        routed_width=512,
    )
    mhc = replace(small.mhc, num_streams=4)
    return replace(small, hidden_size=512, head_dim=128, num_query_groups=4, moe=moe, mhc=mhc)


def model_on(device: torch.device) -> Magi2Transformer:
    weights = random_model(fitting_config()).state_dict()
    for name, tensor in weights.items():
        if tensor.ndim > 1 and "mhc_bias" not in name:
            tensor.mul_(0.3)
    model = Magi2Transformer(fitting_config().with_dtype("bfloat16"))
    model.load_state_dict(weights)
    return model.to(device)


def predict(model: Magi2Transformer, device: torch.device) -> tuple[Tensor, Tensor]:
    denoiser = TransformerDenoiser(model, conditioning(num_images=1))
    return denoiser.predict(*(x.to(device) for x in latents()), 437)


def test_fused_kernels_ran_and_change_only_rounding(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("highest")
    model = model_on(device)
    dispatch.clear_report()
    fused, again = predict(model, device), predict(model, device)
    assert dispatch.report() == {
        "attention": ("cudnn",),
        "mhc": ("triton",),
        "mhc_gates": ("torch",),
        "qk_norm_rope": ("triton",),
        "rms_norm": ("triton",),
        "route": ("triton",),
        "routed_experts": ("hopper",),
        "sink_correction": ("triton",),
        "swiglu7": ("triton",),
    }
    assert all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))
    monkeypatch.setattr(dispatch, "_triton_version", lambda: None)
    for ours, plain in zip(fused, predict(model, device), strict=True):
        assert float((ours - plain).norm() / plain.norm()) <= tolerances.DIT_BF16_DENSE_FORWARD
