"""The audio decoder: loading and shapes. What it computes is held against the golden files."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from magi2.errors import CheckpointError
from magi2.vae import oobleck
from magi2.vae.oobleck import AudioDecoder
from tests.unit.magi2.vae.conftest import OOBLECK

PREFIX = "pretransform.model.decoder."


def configure(folder: Path, place: str, value: Any) -> None:
    """Set one value of the configuration, named by its path; None removes it."""
    config = copy.deepcopy(OOBLECK)
    *parents, last = place.split(".")
    inner: Any = config
    for parent in parents:
        inner = inner[parent]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    (folder / oobleck.CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")


def test_each_latent_becomes_2048_stereo_samples(oobleck_folder: Path) -> None:
    waveform = AudioDecoder.load(oobleck_folder).decode(torch.randn(1, 3, 64))
    assert waveform.shape == (1, 2, 3 * 2048)
    assert waveform.dtype == torch.float32
    assert not waveform.requires_grad


def test_weight_norm_is_folded_into_37_convolutions(oobleck_folder: Path) -> None:
    held = AudioDecoder.load(oobleck_folder).module.state_dict()
    assert len(held) == 145
    assert sum(name.endswith(".weight") for name in held) == 37
    assert not any(name.endswith(("weight_g", "weight_v")) for name in held)


def test_folded_weight_has_the_norm_that_the_checkpoint_gives(
    oobleck_folder: Path, oobleck_weights: dict[str, Tensor]
) -> None:
    weight = AudioDecoder.load(oobleck_folder).module.get_parameter("block.0.conv_t1.weight")
    # Axis 0 of a transposed convolution is its input channel.
    want = oobleck_weights[f"{PREFIX}layers.1.layers.1.weight_g"].abs().flatten()
    torch.testing.assert_close(weight.flatten(1).norm(dim=1), want, rtol=1e-5, atol=1e-7)


def test_other_parts_of_the_audio_model_are_ignored(
    oobleck_folder: Path, oobleck_weights: dict[str, Tensor]
) -> None:
    others = {
        "model.model.weight": torch.zeros(2),
        "pretransform.model.encoder.layers.0.bias": torch.zeros(1),
    }
    save_file(oobleck_weights | others, oobleck_folder / oobleck.CHECKPOINT_NAME)
    assert len(AudioDecoder.load(oobleck_folder).module.state_dict()) == 145


def test_missing_extra_and_misshapen_tensors_are_all_named(
    oobleck_folder: Path, oobleck_weights: dict[str, Tensor]
) -> None:
    changed = dict(oobleck_weights)
    del changed[f"{PREFIX}layers.6.alpha"]
    changed[f"{PREFIX}layers.6.beta"] = torch.zeros(1, 2, 1)
    changed[f"{PREFIX}layers.8.bias"] = torch.zeros(2)
    save_file(changed, oobleck_folder / oobleck.CHECKPOINT_NAME)
    with pytest.raises(CheckpointError) as caught:
        AudioDecoder.load(oobleck_folder)
    assert sorted(caught.value.problems) == [
        f"model.safetensors: tensor {PREFIX}layers.6.alpha is missing",
        f"model.safetensors: tensor {PREFIX}layers.6.beta has the shape [1, 2, 1], expected [2]",
        f"model.safetensors: tensor {PREFIX}layers.8.bias is not part of this network",
    ]


DECODER = "model.pretransform.config.decoder"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (f"{DECODER}.config.final_tanh", True, "final_tanh is True; only False"),
        (f"{DECODER}.config.final_tanh", None, "the field final_tanh is missing"),
        (f"{DECODER}.config.use_nearest_upsample", True, "use_nearest_upsample is True; only False"),
        (f"{DECODER}.config.use_snake", False, "use_snake is False; only True"),
        (
            f"{DECODER}.config.strides",
            [2, 4, 4, 8, 4],
            r"the strides \[2, 4, 4, 8, 4\] must multiply to 2048",
        ),
        (f"{DECODER}.config.c_mults", [1, 2], "must be equally long"),
        (f"{DECODER}.config.channels", "many", "wrong form"),
        (f"{DECODER}.type", "dac", "decoder type is 'dac'; only 'oobleck'"),
        ("model.pretransform.config.bottleneck.type", "rvq", "bottleneck type is 'rvq'; only 'vae'"),
        ("model.pretransform.config.downsampling_ratio", 1024, "downsampling_ratio is 1024; only 2048"),
        ("sample_rate", 48_000, "sample_rate is 48000; only 44100"),
        ("model", None, "the field model is missing"),
    ],
)
def test_config_of_another_decoder_is_refused(
    oobleck_folder: Path, place: str, value: Any, message: str
) -> None:
    configure(oobleck_folder, place, value)
    with pytest.raises(CheckpointError, match=f"{oobleck.CONFIG_NAME}: .*{message}"):
        AudioDecoder.load(oobleck_folder)


@pytest.mark.parametrize("content", [b"", b"junk" * 100])
def test_file_that_is_no_safetensors_is_refused(oobleck_folder: Path, content: bytes) -> None:
    (oobleck_folder / oobleck.CHECKPOINT_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors"):
        AudioDecoder.load(oobleck_folder)


def test_missing_file_is_named(oobleck_folder: Path) -> None:
    (oobleck_folder / oobleck.CHECKPOINT_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file is missing"):
        AudioDecoder.load(oobleck_folder)


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 3, 32), (3, 64)])
def test_latents_of_another_shape_are_refused(oobleck_folder: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"latents \[1, A, 64\] are needed"):
        AudioDecoder.load(oobleck_folder).decode(torch.zeros(shape))
