"""The tiny checkpoint: complete, small, repeatable, and of a kind that shows something."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from magi2.checkpoint.index import missing_files, read_model_config
from magi2.checkpoint.load import load_transformer
from magi2.checkpoint.tiny import NUM_IDLE_EXPERTS, draw_transformer, write_tiny_checkpoint
from magi2.checkpoint.tiny_vae import write_audio_decoder, write_turbo_vae
from magi2.config import ModelConfig
from magi2.model.moe import MultiHeadExperts
from magi2.vae.oobleck import AudioDecoder
from magi2.vae.resample import fourier_resample
from magi2.vae.turbo import TurboDecoder
from magi2.vae.wan22 import ImageEncoder


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_checkpoint_is_complete_and_small(tiny_root: Path) -> None:
    assert missing_files(tiny_root) == []
    assert sum(len(data) for data in contents(tiny_root).values()) < 50e6


def test_transformer_lies_in_several_shards(tiny_root: Path) -> None:
    index = json.loads((tiny_root / "preview/model.safetensors.index.json").read_text("utf-8"))
    assert len(set(index["weight_map"].values())) >= 2


def test_files_are_readable_by_everybody(tiny_root: Path) -> None:
    modes = {path.stat().st_mode & 0o444 for path in tiny_root.rglob("*") if path.is_file()}
    assert modes == {0o444}


def test_same_seed_gives_the_same_bytes(tiny_root: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tiny_root)


def test_another_seed_gives_other_weights() -> None:
    first, second = (draw_transformer(ModelConfig.tiny(), seed=seed) for seed in (0, 1))
    name = "block.layers.0.attention.linear_qkv.weight"
    assert not torch.equal(first[name], second[name])


def test_every_auxiliary_network_loads(tiny_root: Path) -> None:
    ImageEncoder.load(tiny_root / "vae/Wan2.2_VAE.pth")
    TurboDecoder.load(tiny_root / "turbo_vae")
    AudioDecoder.load(tiny_root / "stable-audio-open-1.0")


def test_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        write_tiny_checkpoint(tmp_path)


def test_layers_are_of_both_kinds_with_modalities_at_both_ends(tiny_root: Path) -> None:
    config = read_model_config(tiny_root)
    assert config.num_layers >= 5
    assert (config.mm_layers[0], config.mm_layers[-1]) == (0, config.num_layers - 1)
    assert set(config.moe.layers) == set(range(config.num_layers)) - set(config.mm_layers)
    assert (config.num_heads, config.moe.num_heads) == (4, 4)


def test_some_experts_are_chosen_by_no_token(tiny_root: Path) -> None:
    config = read_model_config(tiny_root)
    transformer = load_transformer(tiny_root / "preview", config)
    experts = cast(MultiHeadExperts, transformer.get_submodule("block.layers.1.mlp.moe_mlp"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, config.moe.num_heads, config.moe_head_dim, generator=generator)
    chosen = set(torch.unique(experts.route(x.bfloat16()).experts).tolist())
    assert chosen == set(range(config.moe.num_experts - NUM_IDLE_EXPERTS))


@pytest.mark.parametrize("seed", [3, 11])
def test_frames_vary_over_space_and_time(tmp_path: Path, seed: int) -> None:
    write_turbo_vae(tmp_path, seed=seed)
    latent = 2 * torch.randn(1, 48, 7, 8, 8, generator=torch.Generator().manual_seed(1))
    frames = torch.cat(list(TurboDecoder.load(tmp_path).decode(latent))).float()
    assert frames.std(dim=(1, 2)).mean() > 5
    assert (frames[8:] - frames[:-8]).abs().mean() > 2


@pytest.mark.parametrize("seed", [4, 11])
def test_sound_is_audible_and_not_clipped(tmp_path: Path, seed: int) -> None:
    write_audio_decoder(tmp_path, seed=seed)
    latent = 3.5 * torch.randn(1, 60, 64, generator=torch.Generator().manual_seed(1))
    samples = fourier_resample(AudioDecoder.load(tmp_path).decode(latent))
    assert samples.square().mean().sqrt() > 0.01
    assert samples.abs().max() < 1
