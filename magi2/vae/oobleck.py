"""The audio decoder: Oobleck, from audio latents to a waveform at 51.2 kHz.

Promises: fp32 throughout, the whole clip in one call, weight norm folded into the weights at load, strict
loading of the decoder's own tensors. The network is diffusers' `AutoencoderOobleck`; the checkpoint's names
are mapped here. The other parts of the audio model are not read. Resampling is in `magi2.vae.resample`.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm

from magi2.errors import CheckpointError
from magi2.vae import weights

CONFIG_NAME = "model_config.json"
CHECKPOINT_NAME = "model.safetensors"
SAMPLES_PER_LATENT = 2048
LATENT_CHANNELS = 64

_PREFIX = "pretransform.model.decoder."
_NORMED = ("weight_g", "weight_v")
_UNIT_PARTS = ("snake1", "conv1", "snake2", "conv2")


@dataclass(frozen=True)
class OobleckConfig:
    """The size of the decoder; strides in the file's order, from output to input."""

    channels: int
    multiples: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, source: str) -> "OobleckConfig":
        """Read the published `model_config.json`.

        Raises:
            CheckpointError: A field is missing or has a value that this decoder does not implement.
        """
        try:
            pretransform = values["model"]["pretransform"]["config"]
            decoder = pretransform["decoder"]["config"]
            problems = _unsupported(values, pretransform, decoder)
            config = cls(
                channels=int(decoder["channels"]),
                multiples=tuple(int(m) for m in decoder["c_mults"]),
                strides=tuple(int(s) for s in decoder["strides"]),
            )
        except KeyError as error:
            raise CheckpointError(f"{source}: the field {error.args[0]} is missing") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{source}: a field has a value of the wrong form: {error}") from None
        if len(config.multiples) != len(config.strides):
            problems.append("c_mults and strides of the decoder must be equally long")
        if math.prod(config.strides) != SAMPLES_PER_LATENT:
            problems.append(f"the strides {list(config.strides)} must multiply to {SAMPLES_PER_LATENT}")
        if problems:
            raise CheckpointError([f"{source}: {problem}" for problem in problems])
        return config


def _unsupported(
    values: Mapping[str, Any], pretransform: Mapping[str, Any], decoder: Mapping[str, Any]
) -> list[str]:
    """Name the fields whose values mean another network or another signal."""
    given = {
        "sample_rate": (values["sample_rate"], 44_100),
        "decoder type": (pretransform["decoder"]["type"], "oobleck"),
        "bottleneck type": (pretransform["bottleneck"]["type"], "vae"),
        "downsampling_ratio": (pretransform["downsampling_ratio"], SAMPLES_PER_LATENT),
        "io_channels": (pretransform["io_channels"], 2),
        "latent_dim": (pretransform["latent_dim"], LATENT_CHANNELS),
        "decoder latent_dim": (decoder["latent_dim"], LATENT_CHANNELS),
        "decoder out_channels": (decoder["out_channels"], 2),
        "use_snake": (decoder["use_snake"], True),
        "final_tanh": (decoder["final_tanh"], False),
        "use_nearest_upsample": (decoder.get("use_nearest_upsample", False), False),
        "antialias_activation": (decoder.get("antialias_activation", False), False),
    }
    return [
        f"{name} is {value!r}; only {wanted!r} is supported"
        for name, (value, wanted) in given.items()
        if value != wanted
    ]


def decoder_names(num_blocks: int) -> dict[str, str]:
    """Map each tensor of the decoder, as the checkpoint names it without prefix, to diffusers' name."""
    names = _parts("layers.0", "conv1", (*_NORMED, "bias"))
    for block in range(num_blocks):
        theirs, ours = f"layers.{block + 1}.layers", f"block.{block}"
        names |= _parts(f"{theirs}.0", f"{ours}.snake1", ("alpha", "beta"))
        names |= _parts(f"{theirs}.1", f"{ours}.conv_t1", (*_NORMED, "bias"))
        for unit in (1, 2, 3):
            for index, part in enumerate(_UNIT_PARTS):
                suffixes = ("alpha", "beta") if part.startswith("snake") else (*_NORMED, "bias")
                names |= _parts(
                    f"{theirs}.{unit + 1}.layers.{index}", f"{ours}.res_unit{unit}.{part}", suffixes
                )
    names |= _parts(f"layers.{num_blocks + 1}", "snake1", ("alpha", "beta"))
    names |= _parts(f"layers.{num_blocks + 2}", "conv2", _NORMED)
    return names


def _parts(theirs: str, ours: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    return {f"{theirs}.{suffix}": f"{ours}.{suffix}" for suffix in suffixes}


class AudioDecoder:
    """The loaded audio decoder.

    Attributes:
        module: diffusers' decoder; it may be moved between devices between two calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @classmethod
    def load(cls, directory: Path, device: torch.device | str = "cpu") -> "AudioDecoder":
        """Read the decoder's tensors of a `stable-audio-open-1.0` folder, in fp32.

        Raises:
            CheckpointError: A file is missing or damaged, or does not fit.
        """
        config = OobleckConfig.from_json(weights.read_json(directory / CONFIG_NAME), source=CONFIG_NAME)
        module = empty_decoder(config)
        names = {f"{_PREFIX}{t}": ours for t, ours in decoder_names(len(config.strides)).items()}
        own_shapes = {name: value.shape for name, value in module.state_dict().items()}
        # The file has one number a channel where diffusers keeps [1, C, 1].
        shapes = {t: own_shapes[o][1:2] if _is_snake(o) else own_shapes[o] for t, o in names.items()}
        path = directory / CHECKPOINT_NAME
        tensors = weights.fit(_read_decoder(path), shapes, left_out=(), path=path)
        own = {names[t]: value.reshape(own_shapes[names[t]]) for t, value in tensors.items()}
        # Folded before the move, so that every device gets the same weights.
        weights.install(module, own, dtype=torch.float32, device="cpu")
        return cls(_fold_weight_norm(module).to(device))

    @torch.no_grad()
    def decode(self, latents_BAC: Tensor) -> Tensor:
        """Decode a clip's audio latents.

        Args:
            latents_BAC: fp32 [1, A, 64], as the sampler returns them; audio latents have no normalisation.

        Returns:
            fp32 [1, 2, 2048 A] on the decoder's device, not clamped.

        Raises:
            ValueError: Another shape.
        Source: the reference. Differs: nothing.
        """
        if latents_BAC.dim() != 3 or latents_BAC.shape[::2] != (1, LATENT_CHANNELS):
            raise ValueError(f"latents [1, A, {LATENT_CHANNELS}] are needed, got {list(latents_BAC.shape)}")
        latents_BCA = latents_BAC.to(weights.device_of(self.module), torch.float32).transpose(1, 2)
        waveform: Tensor = self.module(latents_BCA)
        return waveform


def empty_decoder(config: OobleckConfig) -> nn.Module:
    """Build the decoder without weights, weight norm still in place."""
    # diffusers takes seconds to import and only this loader needs it.
    from diffusers.models.autoencoders.autoencoder_oobleck import AutoencoderOobleck

    arguments: Mapping[str, Any] = {
        "encoder_hidden_size": config.channels,
        "downsampling_ratios": list(config.strides),
        "channel_multiples": list(config.multiples),
        "decoder_channels": config.channels,
        "decoder_input_channels": LATENT_CHANNELS,
        "audio_channels": 2,
        "sampling_rate": 44_100,
    }
    with torch.device("meta"), warnings.catch_warnings():
        # diffusers builds on the old form of weight norm, whose tensor names are the checkpoint's.
        warnings.simplefilter("ignore", FutureWarning)
        module: Any = AutoencoderOobleck(**arguments)
    return cast(nn.Module, module.decoder)


def _fold_weight_norm(module: nn.Module) -> nn.Module:
    for part in list(module.modules()):
        if hasattr(part, "weight_g"):
            remove_weight_norm(part)
    return module.requires_grad_(requires_grad=False)


def _is_snake(name: str) -> bool:
    return name.endswith((".alpha", ".beta"))


def _read_decoder(path: Path) -> dict[str, object]:
    """Read the decoder's tensors; the file is that of the whole audio model, the rest stays on disk."""
    if not path.is_file():
        raise CheckpointError(f"{path.name}: the file is missing; expected at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names if name.startswith(_PREFIX)}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name}: cannot be read as safetensors; it is damaged or incomplete ({error})"
        ) from None
