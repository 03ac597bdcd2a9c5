"""Checkpoint folders of the three networks at tiny size, random, written once for each session of tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from magi2.checkpoint.auxiliary import oobleck_shapes, turbo_shapes, wan22_shapes
from magi2.vae import oobleck, turbo, wan22

WAN22: dict[str, Any] = {
    "dim": 8,
    "dec_dim": 4,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temporal_downsample": [False, True, True],
}
TURBO: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 48,
    "decoder_block_out_channels": [4, 4, 8, 8],
    "decoder_layers_per_block": [1, 1, 1, 1, 1],
    "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False],
    "decoder_is_dw_conv": [False] * 5,
    "decoder_dw_kernel_size": 5,
    "decoder_causal": False,
    "resnet_norm_eps": 1e-6,
    "patch_size": 2,
    "patch_size_t": 1,
    "use_unpatchify": True,
    "scaling_factor": 1.0,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "first_chunk_size": 3,
    "step_size": 2,
    "aligned_blks_indices": [0, 1],
}
OOBLECK: dict[str, Any] = {
    "sample_rate": 44_100,
    "model": {
        "pretransform": {
            "config": {
                "decoder": {
                    "type": "oobleck",
                    "config": {
                        "out_channels": 2,
                        "channels": 2,
                        "c_mults": [1, 2, 2, 4, 4],
                        "strides": [2, 4, 4, 8, 8],
                        "latent_dim": 64,
                        "use_snake": True,
                        "final_tanh": False,
                    },
                },
                "bottleneck": {"type": "vae"},
                "latent_dim": 64,
                "downsampling_ratio": 2048,
                "io_channels": 2,
            }
        }
    },
}


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Draw small weights for the tensors of a network."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="session")
def wan22_weights() -> dict[str, Tensor]:
    return drawn(wan22_shapes(WAN22), 1)


@pytest.fixture(scope="session")
def turbo_weights() -> dict[str, Tensor]:
    return drawn(turbo_shapes(TURBO), 2)


@pytest.fixture(scope="session")
def oobleck_weights() -> dict[str, Tensor]:
    return drawn(oobleck_shapes(OOBLECK), 3)


@pytest.fixture
def wan22_path(tmp_path: Path, wan22_weights: dict[str, Tensor]) -> Path:
    path = tmp_path / wan22.CHECKPOINT_NAME
    torch.save(wan22_weights, path)
    path.with_name(wan22.CONFIG_NAME).write_text(json.dumps(WAN22), encoding="utf-8")
    return path


@pytest.fixture
def turbo_folder(tmp_path: Path, turbo_weights: dict[str, Tensor]) -> Path:
    torch.save(turbo_weights, tmp_path / turbo.CHECKPOINT_NAME)
    (tmp_path / turbo.CONFIG_NAME).write_text(json.dumps(TURBO), encoding="utf-8")
    return tmp_path


@pytest.fixture
def oobleck_folder(tmp_path: Path, oobleck_weights: dict[str, Tensor]) -> Path:
    save_file(oobleck_weights, tmp_path / oobleck.CHECKPOINT_NAME)
    (tmp_path / oobleck.CONFIG_NAME).write_text(json.dumps(OOBLECK), encoding="utf-8")
    return tmp_path
