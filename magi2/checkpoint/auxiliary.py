"""What the checkpoint files of the three auxiliary networks hold: tensor names and shapes, from their sizes.

Covers `vae/Wan2.2_VAE.pth`, `turbo_vae/checkpoint.ckpt` and the decoder inside
`stable-audio-open-1.0/model.safetensors`, in the files' own names; the tiny checkpoint is drawn from these
lists. Reads no file, imports no torch and builds no module; loading and checking is the work of `magi2.vae`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Shapes = dict[str, tuple[int, ...]]

OOBLECK_PREFIX = "pretransform.model.decoder."
TURBO_PREFIX = "decoder."

# The image VAE's file carries no configuration; this is the released one.
WAN22_RELEASED: dict[str, Any] = {
    "dim": 160,
    "dec_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temporal_downsample": [False, True, True],
}

_PATCHED_CHANNELS = 12  # 3 colours in 2x2 cells


def wan22_shapes(config: Mapping[str, Any] = WAN22_RELEASED) -> Shapes:
    """List the tensors of the whole image VAE, encoder and decoder."""
    z, mult, num_blocks = int(config["z_dim"]), list(config["dim_mult"]), int(config["num_res_blocks"])
    down = list(config["temporal_downsample"])
    shapes: Shapes = {}
    widths = [int(config["dim"]) * m for m in [1, *mult]]
    _conv(shapes, "encoder.conv1", widths[0], _PATCHED_CHANNELS, (3, 3, 3))
    for level in range(len(mult)):
        prefix = f"encoder.downsamples.{level}.downsamples"
        _wan22_level(shapes, prefix, widths[level], widths[level + 1], num_blocks)
        if level < len(down):
            resample = f"{prefix}.{num_blocks}"
            _conv(shapes, f"{resample}.resample.1", widths[level + 1], widths[level + 1], (3, 3))
            if down[level]:
                _conv(shapes, f"{resample}.time_conv", widths[level + 1], widths[level + 1], (3, 1, 1))
    _wan22_middle(shapes, "encoder", widths[-1])
    _wan22_head(shapes, "encoder", widths[-1], 2 * z)
    _conv(shapes, "conv1", 2 * z, 2 * z, (1, 1, 1))
    _conv(shapes, "conv2", z, z, (1, 1, 1))
    _wan22_decoder(shapes, config)
    return shapes


def turbo_shapes(config: Mapping[str, Any]) -> Shapes:
    """List the decoder's tensors of a TurboVAE of this JSON configuration; there are no norm weights."""
    widths = list(reversed(config["decoder_block_out_channels"]))
    mid, *layers = reversed(config["decoder_layers_per_block"])
    scaled = list(reversed(config["decoder_spatio_temporal_scaling"]))
    space_only = list(reversed(config["decoder_spatio_only"]))
    shapes: Shapes = {}
    _turbo_conv(shapes, "decoder.conv_in", widths[0], int(config["latent_channels"]), (3, 3, 3))
    for layer in range(mid):
        _turbo_block(shapes, f"decoder.mid_block.resnets.{layer}", widths[0], widths[0])
    previous = widths[0]
    for index, width in enumerate(widths):
        prefix = f"decoder.up_blocks.{index}"
        if width != previous:
            _turbo_block(shapes, f"{prefix}.conv_in", previous, width)
        if scaled[index] or space_only[index]:
            _conv(shapes, f"{prefix}.upsamplers.0.resample.1", width, width, (3, 3))
            if not space_only[index]:
                _turbo_conv(shapes, f"{prefix}.upsamplers.0.time_conv", 2 * width, width, (3, 1, 1))
        for layer in range(layers[index]):
            _turbo_block(shapes, f"{prefix}.resnets.{layer}", width, width)
        previous = width
    cell = int(config["patch_size"]) ** 2 * int(config["patch_size_t"])
    _turbo_conv(shapes, "decoder.conv_out", int(config["out_channels"]) * cell, previous, (3, 3, 3))
    return shapes


def oobleck_shapes(config: Mapping[str, Any]) -> Shapes:
    """List the audio decoder's tensors of a `model_config.json`; the file holds much else."""
    decoder = config["model"]["pretransform"]["config"]["decoder"]["config"]
    strides: Sequence[int] = list(reversed(decoder["strides"]))
    mults = [1, *decoder["c_mults"]]
    widths = [int(decoder["channels"]) * m for m in reversed(mults)]
    prefix = f"{OOBLECK_PREFIX}layers"
    shapes: Shapes = {}
    _weight_norm(shapes, f"{prefix}.0", (widths[0], int(decoder["latent_dim"]), 7), bias=widths[0])
    for index, stride in enumerate(strides, start=1):
        wide, narrow = widths[index - 1], widths[index]
        block = f"{prefix}.{index}.layers"
        _snake(shapes, f"{block}.0", wide)
        _weight_norm(shapes, f"{block}.1", (wide, narrow, 2 * stride), bias=narrow)
        for unit in (2, 3, 4):
            _snake(shapes, f"{block}.{unit}.layers.0", narrow)
            _weight_norm(shapes, f"{block}.{unit}.layers.1", (narrow, narrow, 7), bias=narrow)
            _snake(shapes, f"{block}.{unit}.layers.2", narrow)
            _weight_norm(shapes, f"{block}.{unit}.layers.3", (narrow, narrow, 1), bias=narrow)
    last = len(strides) + 1
    _snake(shapes, f"{prefix}.{last}", widths[-1])
    _weight_norm(shapes, f"{prefix}.{last + 1}", (int(decoder["out_channels"]), widths[-1], 7), bias=None)
    return shapes


def _conv(shapes: Shapes, name: str, out: int, into: int, kernel: tuple[int, ...]) -> None:
    shapes[f"{name}.weight"] = (out, into, *kernel)
    shapes[f"{name}.bias"] = (out,)


def _wan22_level(shapes: Shapes, prefix: str, into: int, out: int, num_blocks: int) -> None:
    for block in range(num_blocks):
        _wan22_block(shapes, f"{prefix}.{block}", into, out)
        into = out


def _wan22_block(shapes: Shapes, prefix: str, into: int, out: int) -> None:
    shapes[f"{prefix}.residual.0.gamma"] = (into, 1, 1, 1)
    _conv(shapes, f"{prefix}.residual.2", out, into, (3, 3, 3))
    shapes[f"{prefix}.residual.3.gamma"] = (out, 1, 1, 1)
    _conv(shapes, f"{prefix}.residual.6", out, out, (3, 3, 3))
    if into != out:
        _conv(shapes, f"{prefix}.shortcut", out, into, (1, 1, 1))


def _wan22_middle(shapes: Shapes, part: str, width: int) -> None:
    _wan22_block(shapes, f"{part}.middle.0", width, width)
    shapes[f"{part}.middle.1.norm.gamma"] = (width, 1, 1)
    _conv(shapes, f"{part}.middle.1.to_qkv", 3 * width, width, (1, 1))
    _conv(shapes, f"{part}.middle.1.proj", width, width, (1, 1))
    _wan22_block(shapes, f"{part}.middle.2", width, width)


def _wan22_head(shapes: Shapes, part: str, width: int, out: int) -> None:
    shapes[f"{part}.head.0.gamma"] = (width, 1, 1, 1)
    _conv(shapes, f"{part}.head.2", out, width, (3, 3, 3))


def _wan22_decoder(shapes: Shapes, config: Mapping[str, Any]) -> None:
    mult, num_blocks = list(config["dim_mult"]), int(config["num_res_blocks"])
    up = list(reversed(config["temporal_downsample"]))
    widths = [int(config["dec_dim"]) * m for m in [mult[-1], *reversed(mult)]]
    _conv(shapes, "decoder.conv1", widths[0], int(config["z_dim"]), (3, 3, 3))
    _wan22_middle(shapes, "decoder", widths[0])
    for level in range(len(mult)):
        prefix = f"decoder.upsamples.{level}.upsamples"
        width = widths[level + 1]
        _wan22_level(shapes, prefix, widths[level], width, num_blocks + 1)
        if level < len(up):
            _conv(shapes, f"{prefix}.{num_blocks + 1}.resample.1", width, width, (3, 3))
            if up[level]:
                _conv(shapes, f"{prefix}.{num_blocks + 1}.time_conv", 2 * width, width, (3, 1, 1))
    _wan22_head(shapes, "decoder", widths[-1], _PATCHED_CHANNELS)


def _turbo_conv(shapes: Shapes, name: str, out: int, into: int, kernel: tuple[int, ...]) -> None:
    _conv(shapes, f"{name}.conv", out, into, kernel)


def _turbo_block(shapes: Shapes, name: str, into: int, out: int) -> None:
    _turbo_conv(shapes, f"{name}.conv1", out, into, (3, 3, 3))
    _turbo_conv(shapes, f"{name}.conv2", out, out, (3, 3, 3))
    if into != out:
        _turbo_conv(shapes, f"{name}.conv_shortcut", out, into, (1, 1, 1))


def _snake(shapes: Shapes, name: str, width: int) -> None:
    shapes[f"{name}.alpha"] = (width,)
    shapes[f"{name}.beta"] = (width,)


def _weight_norm(shapes: Shapes, name: str, shape: tuple[int, ...], *, bias: int | None) -> None:
    # Weight norm keeps axis 0 whatever that is: a transposed convolution's is its input channel.
    shapes[f"{name}.weight_g"] = (shape[0], 1, 1)
    shapes[f"{name}.weight_v"] = shape
    if bias is not None:
        shapes[f"{name}.bias"] = (bias,)
