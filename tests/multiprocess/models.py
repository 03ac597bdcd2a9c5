"""The models of the tier, written once as checkpoints, and what they predict."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from magi2 import packing
from magi2.checkpoint.load import load_transformer
from magi2.checkpoint.tiny import write_transformer
from magi2.config import ModelConfig, MoEConfig, SamplingConfig
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.packing import Conditioning, Reference
from magi2.parallel.groups import Groups
from magi2.sampling.loop import denoise

# Every axis divides by four; multimodal dense, MoE, MoE, multimodal dense.
PLAIN = ModelConfig(
    num_layers=4,
    hidden_size=64,
    head_dim=16,
    num_query_groups=4,
    video_in_channels=6,
    audio_in_channels=8,
    text_in_channels=10,
    mm_layers=(0, 3),
    moe=MoEConfig(
        num_heads=4,
        num_experts=8,
        top_k=2,
        layers=(1, 2),
        expert_width=32,
        shared_width=32,
        modality_width=32,
        route_scale=4.9,
    ),
    params_dtype="float32",
    time_channel_dim=8,
)
THREE_HEADS = replace(PLAIN.moe, num_heads=3)
CONFIGS = {
    "plain": PLAIN,
    "bf16": replace(PLAIN, params_dtype="bfloat16"),
    # Three MoE heads on two ranks: the second has half of its room empty.
    "three": replace(PLAIN, moe=THREE_HEADS, hidden_size=48, head_dim=8, num_query_groups=6),
    # Three MoE heads on four ranks: the last has no real one.
    "idle": replace(PLAIN, moe=THREE_HEADS, hidden_size=96, head_dim=8, num_query_groups=12),
    "eight": replace(PLAIN, head_dim=8, num_query_groups=8),
    "grouped": replace(PLAIN, num_query_groups=2),
    # Other weights in the same names and shapes.
    "other": PLAIN,
}


def write_models(folder: Path) -> None:
    for seed, (name, config) in enumerate(CONFIGS.items()):
        write_transformer(folder / name, config, seed=seed)


def load(folder: Path, name: str, groups: Groups | None = None) -> Magi2Transformer:
    return load_transformer(folder / name, CONFIGS[name], groups=groups)


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditioning(*, with_image: bool = False) -> Conditioning:
    """Branches of 21 and 16 tokens with `latents`: 37 divide by neither 2 nor 4."""
    images = (Reference(seeded(1, 6, 1, 2, 3, seed=3), seeded(1, 1, 10, seed=4)),) if with_image else ()
    return Conditioning((seeded(1, 8, 10, seed=1), seeded(1, 3, 10, seed=2)), images)


def latents() -> tuple[Tensor, Tensor]:
    return seeded(1, 6, 2, 2, 2, seed=5), seeded(1, 5, 8, seed=6)


def predict(
    model: Magi2Transformer, *, with_image: bool = False, timestep: int = 700
) -> tuple[Tensor, Tensor]:
    return TransformerDenoiser(model, conditioning(with_image=with_image)).predict(*latents(), timestep)


class BranchesApart:
    """A denoiser that predicts one branch after the other, each in a sequence of its own."""

    def __init__(self, model: Magi2Transformer, conditions: Conditioning) -> None:
        branches = (packing.CONDITIONAL, packing.UNCONDITIONAL)
        self._each = [TransformerDenoiser(model, conditions, branches=(branch,)) for branch in branches]

    def predict(self, video: Tensor, audio: Tensor, timestep: int) -> tuple[Tensor, Tensor]:
        videos, audios = zip(*(each.predict(video, audio, timestep) for each in self._each), strict=True)
        return torch.cat(videos), torch.cat(audios)


def solve(
    model: Magi2Transformer,
    num_steps: int = 2,
    *,
    denoiser_type: type[TransformerDenoiser] | type[BranchesApart] = TransformerDenoiser,
) -> tuple[Tensor, Tensor]:
    """Take the noise through all steps, with an image."""
    denoiser = denoiser_type(model, conditioning(with_image=True))
    clean = denoise(denoiser, *latents(), num_steps=num_steps, sampling=SamplingConfig())
    return clean.video, clean.audio
