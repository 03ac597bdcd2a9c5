"""The tiny checkpoint: random weights in the released folder layout, small enough to render on two CPU cores.

Promises: every folder and file that the engine needs, with the released names and file kinds; the
transformer in several shards; the same bytes for the same seed and library versions; finite, visible and
audible results. It is no trained model: what it renders has nothing to do with the meaning of the prompt,
though prompt, image and seed all change it.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from magi2.checkpoint.index import INDEX_NAME, PREVIEW, TEXT_ENCODER, write_model_config
from magi2.checkpoint.keys import expected_tensors
from magi2.checkpoint.tiny_text import write_text_encoder
from magi2.checkpoint.tiny_vae import write_audio_decoder, write_image_vae, write_turbo_vae
from magi2.config import NUM_MODALITIES, ModelConfig
from magi2.packing import TEXT

DEFAULT_SEED = 0
NUM_SHARDS = 2
# Per MoE head: experts that the averaged bias keeps every token away from, as happens in a trained model.
NUM_IDLE_EXPERTS = 2
_NEVER = -2.0  # scores lie in (0, 1)


def write_tiny_checkpoint(directory: Path, *, seed: int = DEFAULT_SEED) -> None:
    """Write a whole checkpoint folder.

    Raises:
        FileExistsError: The folder exists and is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} is not an empty folder; name another, or delete it first")
    config = ModelConfig.tiny()
    write_model_config(directory, config)
    write_transformer(directory / PREVIEW, config, seed=seed)
    write_text_encoder(directory / TEXT_ENCODER, width=config.text_in_channels, seed=seed + 1)
    write_image_vae(directory / "vae", seed=seed + 2)
    write_turbo_vae(directory / "turbo_vae", seed=seed + 3)
    write_audio_decoder(directory / "stable-audio-open-1.0", seed=seed + 4)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes for the owner alone; workers run as somebody else


def write_transformer(directory: Path, config: ModelConfig, *, seed: int) -> None:
    """Write the transformer's shards and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = draw_transformer(config, seed=seed)
    names = sorted(weights)
    size = math.ceil(len(names) / NUM_SHARDS)
    weight_map: dict[str, str] = {}
    for shard in range(NUM_SHARDS):
        file_name = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        own = names[shard * size : (shard + 1) * size]
        save_file({name: weights[name] for name in own}, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file_name)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def draw_transformer(config: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """Draw every tensor of the transformer, in its released dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _draw(name, need.shape, config, generator).to(need.dtype).contiguous()
        for name, need in sorted(expected_tensors(config).items())
    }


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    part = name.removesuffix(".weight").split(".")[-1]
    if part == "bands":
        return 10_000.0 ** (-torch.arange(config.num_bands) / config.num_bands)
    if "norm" in part:
        return _draw_norm(part, noise, config)
    if part.startswith("mhc_"):
        return _draw_mixing(part, noise)
    if part.startswith("expert_bias"):
        return _draw_router_bias(part, noise, config)
    if part in {"sinks", "bias"}:
        return 0.3 * noise
    # The routes of a token are scaled up, as released.
    gain = 1 / config.moe.route_scale if part == "W_down" else 1.0
    return noise * gain / math.sqrt(shape[1])


def _draw_mixing(part: str, noise: Tensor) -> Tensor:
    if "phi" in part:
        return noise
    if "alpha" in part:
        return 0.5 + 0.1 * noise
    if "bias_res" in part:  # streams keep mostly to themselves
        return 2 * torch.eye(noise.shape[0]) + 0.3 * noise
    return 0.3 * noise


def _draw_norm(part: str, noise: Tensor, config: ModelConfig) -> Tensor:
    weight = 0.2 * noise
    width = config.head_dim
    if part == "k_norm" and noise.shape[0] == NUM_MODALITIES * width:
        # A clip has far more video tokens than words: louder keys let the words count among them.
        weight[TEXT * width : (TEXT + 1) * width] += 2.0
    return weight


def _draw_router_bias(part: str, noise: Tensor, config: ModelConfig) -> Tensor:
    bias = (0.05 * noise).view(-1, config.moe.num_experts)
    if part.endswith("_ema"):  # the one that counts
        bias[:, -NUM_IDLE_EXPERTS:] = _NEVER
    return bias.flatten()
