"""The image encoder: the encoder half of the Wan2.2 VAE, from a reference image to one latent frame.

Promises: fp32 throughout, the posterior's mean (never a sample), normalised; strict loading of the encoder's
own tensors. The network is diffusers' `AutoencoderKLWan`; the checkpoint's names are mapped here. The decoder
half is not kept and its tensors are not read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from magi2.errors import CheckpointError
from magi2.vae import weights
from magi2.vae.constants import LATENT_CHANNELS, normalize

CHECKPOINT_NAME = "Wan2.2_VAE.pth"
# Stands beside a checkpoint of other than the released size; the released folder has none.
CONFIG_NAME = "config.json"

# The decoder half and its input convolution: in the file, never read.
_LEFT_OUT = ("decoder.", "conv2.")
_PATCH = 2
_CONV = ("weight", "bias")
_RESIDUAL = {
    "residual.0.gamma": "norm1.gamma",
    "residual.2.weight": "conv1.weight",
    "residual.2.bias": "conv1.bias",
    "residual.3.gamma": "norm2.gamma",
    "residual.6.weight": "conv2.weight",
    "residual.6.bias": "conv2.bias",
}
_SHORTCUT = {"shortcut.weight": "conv_shortcut.weight", "shortcut.bias": "conv_shortcut.bias"}


@dataclass(frozen=True)
class Wan22Config:
    """The size of the VAE; without arguments, the released one."""

    dim: int = 160
    dec_dim: int = 256
    z_dim: int = LATENT_CHANNELS
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)

    @classmethod
    def beside(cls, checkpoint: Path) -> "Wan22Config":
        """Read a checkpoint's size from the `config.json` in its folder; without one it is the released size.

        Raises:
            CheckpointError: The file is there and does not say a size that the engine can use.
        """
        path = checkpoint.with_name(CONFIG_NAME)
        if not path.exists():
            return cls()
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            config = cls(
                dim=int(values["dim"]),
                dec_dim=int(values["dec_dim"]),
                z_dim=int(values["z_dim"]),
                dim_mult=tuple(int(m) for m in values["dim_mult"]),
                num_res_blocks=int(values["num_res_blocks"]),
                temporal_downsample=tuple(bool(t) for t in values["temporal_downsample"]),
            )
        except KeyError as error:
            raise CheckpointError(f"vae/{path.name}: the field {error.args[0]} is missing") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"vae/{path.name}: cannot be read as a VAE configuration: {error}"
            ) from None
        if config.z_dim != LATENT_CHANNELS:
            raise CheckpointError(
                f"vae/{path.name}: z_dim is {config.z_dim}; the model needs {LATENT_CHANNELS}"
            )
        if len(config.temporal_downsample) != len(config.dim_mult) - 1:
            raise CheckpointError(f"vae/{path.name}: temporal_downsample needs one entry less than dim_mult")
        return config


def encoder_names(config: Wan22Config) -> dict[str, str]:
    """Map each tensor of the encoder, as the checkpoint names it, to its name in diffusers' class."""
    names = {f"conv1.{part}": f"quant_conv.{part}" for part in _CONV}
    names |= {f"encoder.conv1.{part}": f"encoder.conv_in.{part}" for part in _CONV}
    widths = [config.dim * mult for mult in (1, *config.dim_mult)]
    for level in range(len(config.dim_mult)):
        theirs, ours = f"encoder.downsamples.{level}.downsamples", f"encoder.down_blocks.{level}"
        for block in range(config.num_res_blocks):
            has_shortcut = block == 0 and widths[level] != widths[level + 1]
            names |= _block(f"{theirs}.{block}", f"{ours}.resnets.{block}", has_shortcut=has_shortcut)
        if level < len(config.temporal_downsample):
            parts = ["resample.1"] + ["time_conv"] * config.temporal_downsample[level]
            resample = f"{theirs}.{config.num_res_blocks}"
            names |= {f"{resample}.{p}.{q}": f"{ours}.downsampler.{p}.{q}" for p in parts for q in _CONV}
    names |= dict(_middle())
    names["encoder.head.0.gamma"] = "encoder.norm_out.gamma"
    names |= {f"encoder.head.2.{part}": f"encoder.conv_out.{part}" for part in _CONV}
    return names


def _middle() -> Iterator[tuple[str, str]]:
    yield from _block("encoder.middle.0", "encoder.mid_block.resnets.0", has_shortcut=False).items()
    yield from _block("encoder.middle.2", "encoder.mid_block.resnets.1", has_shortcut=False).items()
    attention = ("norm.gamma", *(f"{name}.{part}" for name in ("to_qkv", "proj") for part in _CONV))
    for part in attention:
        yield f"encoder.middle.1.{part}", f"encoder.mid_block.attentions.0.{part}"


def _block(theirs: str, ours: str, *, has_shortcut: bool) -> dict[str, str]:
    parts = _RESIDUAL | (_SHORTCUT if has_shortcut else {})
    return {f"{theirs}.{old}": f"{ours}.{new}" for old, new in parts.items()}


class ImageEncoder:
    """The loaded image encoder.

    Attributes:
        module: diffusers' VAE without its decoder; it may be moved between devices between two calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> "ImageEncoder":
        """Read the encoder's half of `vae/Wan2.2_VAE.pth`, in fp32.

        Raises:
            CheckpointError: The file is missing, unsafe or damaged, or does not fit.
        """
        config = Wan22Config.beside(path)
        module = empty_encoder(config)
        names = encoder_names(config)
        own_shapes = {name: value.shape for name, value in module.state_dict().items()}
        shapes = {theirs: own_shapes[ours] for theirs, ours in names.items()}
        tensors = weights.fit(weights.read_pickle(path), shapes, left_out=_LEFT_OUT, path=path)
        own = {names[theirs]: tensor for theirs, tensor in tensors.items()}
        return cls(weights.install(module, own, dtype=torch.float32, device=device))

    @torch.no_grad()
    def encode(self, pixels_BCTYX: Tensor) -> Tensor:
        """Encode a reference image.

        Args:
            pixels_BCTYX: fp32 [1, 3, T, Y, X] in [-1, 1], sides divisible by 32; T is 1 for an image. Of a
                longer clip one frame and then groups of four are encoded, and a rest is dropped.

        Returns:
            fp32 [1, 48, 1 + (T - 1) // 4, Y / 16, X / 16] on the encoder's device, the normalised mean.

        Raises:
            ValueError: Not fp32, or of another shape.
        Source: the reference. TF32 stays as the process has set it: torch's default allows it in cuDNN.
        """
        shape = pixels_BCTYX.shape
        if len(shape) != 5 or shape[:2] != (1, 3) or pixels_BCTYX.dtype != torch.float32:
            raise ValueError(
                f"fp32 pixels [1, 3, T, Y, X] are needed, got {pixels_BCTYX.dtype} {list(shape)}"
            )
        posterior = cast(Any, self.module).encode(pixels_BCTYX.to(weights.device_of(self.module))).latent_dist
        return normalize(posterior.mean)


def empty_encoder(config: Wan22Config) -> nn.Module:
    """Build the VAE without weights and without its decoder half."""
    # diffusers takes seconds to import and only this loader needs it.
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    arguments: Mapping[str, Any] = {
        "base_dim": config.dim,
        "decoder_base_dim": config.dec_dim,
        "z_dim": config.z_dim,
        "dim_mult": list(config.dim_mult),
        "num_res_blocks": config.num_res_blocks,
        "temperal_downsample": list(config.temporal_downsample),  # their spelling
        "is_residual": True,
        "in_channels": 3 * _PATCH**2,
        "out_channels": 3 * _PATCH**2,
        "patch_size": _PATCH,
        "scale_factor_spatial": 16,
    }
    with torch.device("meta"):
        module: Any = AutoencoderKLWan(**arguments)
    module.decoder = None
    module.post_quant_conv = None
    return cast(nn.Module, module)
