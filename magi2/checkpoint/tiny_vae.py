"""The three auxiliary networks of the tiny checkpoint: random weights in the released files' layout.

Promises the released names and file kinds (a plain dictionary, a training state with an average, the whole
audio model's safetensors), finite outputs that can be looked at (soft shapes that drift and change colour)
and listened to (a low murmur, never clipped), and the same values for the same seed. The image VAE's file
gets a `config.json` beside it, which the released folder does not need.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from magi2.checkpoint.auxiliary import Shapes, oobleck_shapes, turbo_shapes, wan22_shapes

WAN22_TINY: dict[str, Any] = {
    "dim": 8,
    "dec_dim": 4,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temporal_downsample": [False, True, True],
}

TURBO_TINY: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 48,
    "decoder_block_out_channels": [8, 8, 12, 16],  # fewer than 8 are slower: no blocked layout
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
    "first_chunk_size": 7,
    "step_size": 7,
}

_OOBLECK_SIZES: dict[str, Any] = {
    "channels": 4,
    "c_mults": [1, 2, 4, 8, 16],
    "strides": [2, 4, 4, 8, 8],
    "use_snake": True,
}
OOBLECK_TINY: dict[str, Any] = {
    "model_type": "diffusion_cond",
    "sample_size": 2097152,
    "sample_rate": 44100,
    "audio_channels": 2,
    "model": {
        "pretransform": {
            "type": "autoencoder",
            "iterate_batch": True,
            "config": {
                "encoder": {
                    "type": "oobleck",
                    "config": {"in_channels": 2, "latent_dim": 128, **_OOBLECK_SIZES},
                },
                "decoder": {
                    "type": "oobleck",
                    "config": {"out_channels": 2, "latent_dim": 64, "final_tanh": False, **_OOBLECK_SIZES},
                },
                "bottleneck": {"type": "vae"},
                "latent_dim": 64,
                "downsampling_ratio": 2048,
                "io_channels": 2,
            },
        }
    },
}

# Tensors of the released audio file that no part of the engine reads.
_UNUSED_AUDIO = {
    "model.model.timestep_features.weight": (128, 1),
    "conditioner.conditioners.seconds_total.scale": (2,),
    "pretransform.model.encoder.layers.0.bias": (4,),
}


def write_image_vae(directory: Path, *, seed: int) -> None:
    """Write `vae/Wan2.2_VAE.pth` and the `config.json` that says how small it is."""
    generator = torch.Generator().manual_seed(seed)
    shapes = sorted(wan22_shapes(WAN22_TINY).items())
    weights = {name: _plain(name, shape, generator) for name, shape in shapes}
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(weights, directory / "Wan2.2_VAE.pth")
    _write_json(directory / "config.json", WAN22_TINY)


def write_turbo_vae(directory: Path, *, seed: int) -> None:
    """Write `turbo_vae/`: the JSON, and a training state whose EMA is what counts."""
    generator = torch.Generator().manual_seed(seed)
    shapes = sorted(turbo_shapes(TURBO_TINY).items())
    ema = {f"module.{name}": _smooth(name, shape, generator) for name, shape in shapes}
    raw = {
        name: weight + 0.01 * torch.randn(weight.shape, generator=generator) for name, weight in ema.items()
    }
    for state in (ema, raw):
        state["module.aligned_feature_projection_heads.0.weight"] = torch.zeros(4, 4)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 1, "ema_state_dict": ema, "state_dict": raw}, directory / "checkpoint.ckpt")
    _write_json(directory / "TurboV3-Wan22-TinyShallow_7_7.json", TURBO_TINY)


def write_audio_decoder(directory: Path, *, seed: int) -> None:
    """Write `stable-audio-open-1.0/`: the decoder among other parts of the audio model."""
    generator = torch.Generator().manual_seed(seed)
    weights = _oobleck(oobleck_shapes(OOBLECK_TINY), generator)
    weights |= {name: torch.zeros(shape) for name, shape in _UNUSED_AUDIO.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "model_config.json", OOBLECK_TINY)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _plain(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw a weight that keeps the size of what passes through it."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("gamma"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.05 * noise
    return noise / math.sqrt(math.prod(shape[1:]))


def _smooth(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw a convolution that mixes channels at random but blurs space and time: shapes come out soft."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    mix = torch.randn(shape[:2], generator=generator) / math.sqrt(shape[1])
    if "time_conv" in name:
        return _smooth_time(shape, mix)
    if ".conv1." in name or ".conv2." in name or "conv_out" in name:
        # What comes out of an activation is positive: rows that sum to zero answer to differences alone, or
        # one colour would fill the picture.
        mix = mix - mix.mean(dim=1, keepdim=True)
    if "conv_out" in name:  # the four pixels of a cell take one colour, or a grid shows
        mix = (mix / mix.std(dim=1, keepdim=True))[:: shape[0] // 3].repeat_interleave(shape[0] // 3, dim=0)
    blur = torch.tensor(1.0)
    for size in shape[2:]:
        taps = torch.tensor([1.0, 2.0, 1.0]) / 4 if size == 3 else torch.ones(1)
        blur = blur[..., None] * taps
    if name.endswith("decoder.conv_in.conv.weight"):
        # Guidance adds much that is the same everywhere: let most of it pass by, or it colours all pixels.
        blur = blur - 0.8 * blur.mean()
    gain = 0.8 if "conv_out" in name else 2.0
    return gain * mix.reshape(*shape[:2], *([1] * blur.ndim)) * blur


def _smooth_time(shape: tuple[int, ...], mix: torch.Tensor) -> torch.Tensor:
    # The first half of the output channels are the even frames, the second half the odd ones: one mix for
    # both, with taps half a step apart, or the two would flicker against each other.
    half = shape[0] // 2
    even, odd = torch.tensor([0.25, 0.5, 0.25]), torch.tensor([0.0, 0.5, 0.5])
    halves = [mix[:half, :, None] * taps for taps in (even, odd)]
    return torch.cat(halves).reshape(shape).contiguous()


def _oobleck(shapes: Shapes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("alpha", "beta")):
            weights[name] = 0.3 * noise
        elif name.endswith("bias"):
            weights[name] = 0.02 * noise
        elif name.endswith("weight_v"):
            weights[name] = _oobleck_direction(name, noise)
        else:
            gain = _oobleck_gain(name, shapes[name.replace("weight_g", "weight_v")])
            weights[name] = gain * (1 + 0.1 * noise)
    return weights


def _oobleck_direction(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Leave the first two blocks rough, which makes the sound, and smooth the others, which would hiss."""
    block, size = _oobleck_layer(name)[0], noise.shape[2]
    if block < 3 or size == 1:
        return noise
    window = torch.hann_window(size + 2, periodic=False)[1:-1]
    return noise[:, :, :1] * (window if size % 2 == 0 else window**4)


def _oobleck_gain(name: str, shape: tuple[int, ...]) -> float:
    """Return the weight norm at which a convolution keeps the size of its input."""
    block, *inner = _oobleck_layer(name)
    if block == len(_OOBLECK_SIZES["strides"]) + 2:
        return 0.005  # to the loudness of quiet speech
    if inner == [1]:
        into, out, kernel = shape  # transposed: half the kernel's taps meet in each sample
        return math.sqrt(kernel / 2 * out / into)
    return 0.5


def _oobleck_layer(name: str) -> list[int]:
    """Return the indices in a name: the layer, then the parts inside it."""
    return [int(part) for part in name.split(".") if part.isdigit()]
