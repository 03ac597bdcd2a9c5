"""The image encoder: loading and shapes. What it computes is held against the golden files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magi2.errors import CheckpointError
from magi2.vae.wan22 import ImageEncoder, Wan22Config, empty_encoder, encoder_names
from tests.unit.magi2.vae.conftest import WAN22


def configure(path: Path, **changes: Any) -> None:
    path.with_name("config.json").write_text(json.dumps(WAN22 | changes), encoding="utf-8")


def test_image_becomes_one_normalised_latent_frame(wan22_path: Path) -> None:
    latent = ImageEncoder.load(wan22_path).encode(torch.zeros(1, 3, 1, 64, 96))
    assert latent.shape == (1, 48, 1, 4, 6)
    assert latent.dtype == torch.float32
    assert latent.isfinite().all()
    assert not latent.requires_grad


def test_encode_is_the_mean_and_not_a_sample(wan22_path: Path) -> None:
    encoder = ImageEncoder.load(wan22_path)
    pixels = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 1, 32, 32)
    assert torch.equal(encoder.encode(pixels), encoder.encode(pixels))


def test_only_the_encoder_half_is_kept(wan22_path: Path, wan22_weights: dict[str, Tensor]) -> None:
    held = ImageEncoder.load(wan22_path).module.state_dict()
    names = encoder_names(Wan22Config.beside(wan22_path))
    assert {ours: theirs for theirs, ours in names.items()}.keys() == held.keys()
    assert all(torch.equal(held[ours], wan22_weights[theirs]) for theirs, ours in names.items())
    assert not any(name.startswith(("decoder.", "conv2.")) for name in names)


def test_size_without_a_config_file_is_the_released_one(wan22_path: Path) -> None:
    wan22_path.with_name("config.json").unlink()
    assert Wan22Config.beside(wan22_path) == Wan22Config()
    with pytest.raises(
        CheckpointError, match=r"encoder\.conv1\.weight has the shape \[8, .*expected \[160, "
    ):
        ImageEncoder.load(wan22_path)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_names_cover_the_module_for_any_depth(num_blocks: int) -> None:
    config = Wan22Config(dim=4, dec_dim=4, num_res_blocks=num_blocks)
    names = encoder_names(config)
    assert set(names.values()) == set(empty_encoder(config).state_dict())
    assert len(set(names.values())) == len(names)


def test_missing_extra_and_misshapen_tensors_are_all_named(
    wan22_path: Path, wan22_weights: dict[str, Tensor]
) -> None:
    changed = dict(wan22_weights)
    del changed["encoder.head.0.gamma"]
    changed["conv1.bias"] = torch.zeros(2)
    changed["encoder.extra.weight"] = torch.zeros(2)
    torch.save(changed, wan22_path)
    with pytest.raises(CheckpointError) as caught:
        ImageEncoder.load(wan22_path)
    assert sorted(caught.value.problems) == [
        "Wan2.2_VAE.pth: tensor conv1.bias has the shape [2], expected [96]",
        "Wan2.2_VAE.pth: tensor encoder.extra.weight is not part of this network",
        "Wan2.2_VAE.pth: tensor encoder.head.0.gamma is missing",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_dim": 16}, "z_dim is 16; the model needs 48"),
        ({"dim": "wide"}, "cannot be read as a VAE configuration"),
        ({"dim_mult": 4}, "cannot be read as a VAE configuration"),
        ({"temporal_downsample": [True]}, "needs one entry less than dim_mult"),
    ],
)
def test_config_that_does_not_fit_is_refused(wan22_path: Path, changes: dict[str, Any], message: str) -> None:
    configure(wan22_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        ImageEncoder.load(wan22_path)


@pytest.mark.parametrize("content", ["{}", "[]", "{", ""])
def test_config_that_says_no_size_is_refused(wan22_path: Path, content: str) -> None:
    wan22_path.with_name("config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"vae/config\.json: "):
        ImageEncoder.load(wan22_path)


@pytest.mark.parametrize("shape", [(2, 3, 1, 32, 32), (1, 4, 1, 32, 32), (3, 1, 32, 32)])
def test_pixels_of_another_shape_are_refused(wan22_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"fp32 pixels \[1, 3, T, Y, X\] are needed"):
        ImageEncoder.load(wan22_path).encode(torch.zeros(shape))


def test_pixels_of_another_dtype_are_refused(wan22_path: Path) -> None:
    with pytest.raises(ValueError, match="fp32 pixels"):
        ImageEncoder.load(wan22_path).encode(torch.zeros(1, 3, 1, 32, 32, dtype=torch.float64))
