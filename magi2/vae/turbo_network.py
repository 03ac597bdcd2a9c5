"""The TurboVAE decoder network: its configuration, and one call of it.

Promises: the network of the released configuration file, with the checkpoint's tensor names below `decoder.`;
every value of a configuration that would mean another network is refused. It reads no weights and knows of no
windows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from magi2.errors import CheckpointError
from magi2.vae.constants import LATENT_CHANNELS, SPATIAL_FACTOR, TEMPORAL_FACTOR

_NORM_EPS = 1e-8
_PATCH = 2
# Values of one slice in the norm. On a GPU it bounds each fp32 temporary to 256 MiB; on the CPU they stay in
# the processor's caches.
_NORM_SLICE_VALUES = 2**26
_NORM_SLICE_VALUES_CPU = 2**18


@dataclass(frozen=True)
class TurboConfig:
    """The shape of the decoder; lists run from its input to its output, unlike in the file."""

    widths: tuple[int, ...]
    num_mid_layers: int
    num_layers: tuple[int, ...]
    upsamples: tuple[str, ...]  # "time_space", "space" or "none" for each up block
    shortcut_eps: float
    first_chunk_size: int
    step_size: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, source: str) -> "TurboConfig":
        """Read the released configuration file's fields; training-only fields are ignored.

        Raises:
            CheckpointError: A field is missing or has a value that this decoder does not implement.
        """
        try:
            problems = _unsupported(values)
            widths = tuple(reversed(values["decoder_block_out_channels"]))
            num_mid_layers, *num_layers = reversed(values["decoder_layers_per_block"])
            scaled = list(reversed(values["decoder_spatio_temporal_scaling"]))
            space_only = list(reversed(values["decoder_spatio_only"]))
            config = cls(
                widths=widths,
                num_mid_layers=num_mid_layers,
                num_layers=tuple(num_layers),
                upsamples=tuple(_kind(*flags) for flags in zip(scaled, space_only, strict=True)),
                shortcut_eps=float(values["resnet_norm_eps"]),
                first_chunk_size=int(values["first_chunk_size"]),
                step_size=int(values["step_size"]),
            )
        except KeyError as error:
            raise CheckpointError(f"{source}: the field {error.args[0]} is missing") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{source}: a field has a value of the wrong form: {error}") from None
        problems += config._inconsistencies()
        if problems:
            raise CheckpointError([f"{source}: {problem}" for problem in problems])
        return config

    def _inconsistencies(self) -> Iterator[str]:
        if not len(self.widths) == len(self.num_layers) == len(self.upsamples):
            yield "the lists of decoder blocks must be equally long, decoder_layers_per_block longer by one"
        space = _PATCH * 2 ** sum(kind != "none" for kind in self.upsamples)
        time = 2 ** sum(kind == "time_space" for kind in self.upsamples)
        if (space, time) != (SPATIAL_FACTOR, TEMPORAL_FACTOR):
            yield f"the blocks enlarge by {space} in space and {time} in time; 16 and 4 are needed"
        if min(self.first_chunk_size, self.step_size) < 1:
            yield f"the window {self.first_chunk_size}/{self.step_size} must be positive"


def _kind(scaled: object, space_only: object) -> str:
    if space_only and not scaled:
        raise ValueError("decoder_spatio_only is true where decoder_spatio_temporal_scaling is false")
    return ("space" if space_only else "time_space") if scaled else "none"


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    """Name the fields whose values mean another network than the one below."""
    required = {
        "decoder_causal": False,
        "use_unpatchify": True,
        "patch_size": _PATCH,
        "patch_size_t": 1,
        "latent_channels": LATENT_CHANNELS,
        "out_channels": 3,
        "spatial_compression_ratio": SPATIAL_FACTOR,
        "temporal_compression_ratio": TEMPORAL_FACTOR,
    }
    problems = [
        f"{name} is {values[name]!r}; only {wanted!r} is supported"
        for name, wanted in required.items()
        if values[name] != wanted
    ]
    if any(values["decoder_is_dw_conv"]):
        problems.append("decoder_is_dw_conv asks for depthwise convolutions; only false is supported")
    return problems


def rms_norm(x_BCTYX: Tensor, eps: float, *, num_edge: int = 0) -> Tensor:
    """Divide by the root mean square over channels, computed in fp32 and returned in the input's dtype.

    It runs in slices of time so that the fp32 temporaries stay small. Equal shapes are sliced equally: equal
    windows stay equal bit for bit, while other slices could move the last bit of a mean.

    Args:
        x_BCTYX: any float dtype, B is 1.
        eps: Added to the mean square.
        num_edge: How often the first and the last frame of the result are repeated around it, 0 or 1.
    """
    batch, channels, num_steps, rows, columns = x_BCTYX.shape
    is_cpu = x_BCTYX.device.type == "cpu"
    padded = torch.empty(
        (batch, channels, num_steps + 2 * num_edge, rows, columns),
        dtype=x_BCTYX.dtype,
        device=x_BCTYX.device,
        # The convolution takes over this layout. With the channels innermost oneDNN needs half the time,
        # cuDNN on an H200 half as much again.
        memory_format=torch.channels_last_3d if is_cpu else torch.contiguous_format,
    )
    out = padded[:, :, num_edge : num_edge + num_steps]
    slice_values = _NORM_SLICE_VALUES_CPU if is_cpu else _NORM_SLICE_VALUES
    per_slice = max(1, slice_values // (channels * rows * columns))
    for start in range(0, num_steps, per_slice):
        part = x_BCTYX[:, :, start : start + per_slice]
        scale = part.float().square().mean(dim=1, keepdim=True).add_(eps).rsqrt_()
        out[:, :, start : start + per_slice] = part * scale
    if num_edge:
        padded[:, :, 0], padded[:, :, -1] = out[:, :, 0], out[:, :, -1]
    return padded


class EdgeConv3d(nn.Module):
    """A 3D convolution with zeros around space and repeated edge frames around time."""

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, int, int]) -> None:
        super().__init__()
        self.num_edge = kernel[0] // 2
        self.conv = nn.Conv3d(in_channels, out_channels, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))

    def forward(self, x_BCTYX: Tensor, *, has_edges: bool = False) -> Tensor:
        """Convolve; an input that comes with its edge frames is not copied to add them."""
        if self.num_edge and not has_edges:
            x_BCTYX = torch.cat((x_BCTYX[:, :, :1], x_BCTYX, x_BCTYX[:, :, -1:]), dim=2)
        return _convolve(self.conv, x_BCTYX)


class ResBlock(nn.Module):
    """Two normalised convolutions beside a shortcut; only the first activation varies."""

    def __init__(self, in_channels: int, out_channels: int, *, shortcut_eps: float, use_relu: bool) -> None:
        super().__init__()
        self.activate = functional.relu_ if use_relu else _silu_
        self.shortcut_eps = shortcut_eps
        self.conv1 = EdgeConv3d(in_channels, out_channels, (3, 3, 3))
        self.conv2 = EdgeConv3d(out_channels, out_channels, (3, 3, 3))
        if in_channels != out_channels:
            self.conv_shortcut = EdgeConv3d(in_channels, out_channels, (1, 1, 1))

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        hidden = self.conv1(self.activate(rms_norm(x_BCTYX, _NORM_EPS, num_edge=1)), has_edges=True)
        hidden = self.conv2(_silu_(rms_norm(hidden, _NORM_EPS, num_edge=1)), has_edges=True)
        if hasattr(self, "conv_shortcut"):
            x_BCTYX = self.conv_shortcut(rms_norm(x_BCTYX, self.shortcut_eps))
        out: Tensor = hidden.add_(x_BCTYX)
        return out


class Upsampler(nn.Module):
    """Double the rows and columns and, with time, the frames."""

    def __init__(self, channels: int, *, with_time: bool) -> None:
        super().__init__()
        if with_time:
            self.time_conv = EdgeConv3d(channels, 2 * channels, (3, 1, 1))
        # The first entry holds no weights but keeps the checkpoint's numbering; it copies in any dtype.
        self.resample = nn.ModuleList(
            [nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(channels, channels, 3, padding=1)]
        )

    def forward(self, x_BCTYX: Tensor, *, is_first: bool) -> Tensor:
        if hasattr(self, "time_conv"):
            x_BCTYX = _interleave(self.time_conv(x_BCTYX))
            if is_first:
                x_BCTYX = x_BCTYX[:, :, 1:]
        enlarge, convolution = self.resample
        # B is 1, so the frames can take its place.
        x_TCYX = _convolve(convolution, enlarge(x_BCTYX[0].transpose(0, 1)))
        return x_TCYX.transpose(0, 1).unsqueeze(0)


def _interleave(x_BCTYX: Tensor) -> Tensor:
    """Spread channel halves over time: the first half is the even new frame, the second the odd one."""
    return torch.stack(x_BCTYX.chunk(2, dim=1), dim=3).flatten(2, 3)


def _convolve(convolution: nn.Module, x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _has_bf16_convolutions():
        # Without AVX-512 torch has only a scalar loop for this. In fp32 the sum is the same and far faster.
        parameters = {name: value.float() for name, value in convolution.named_parameters()}
        wide = functional_call(convolution, parameters, x.float())
        return cast(Tensor, wide).to(torch.bfloat16)
    return cast(Tensor, convolution(x))


@cache
def _has_bf16_convolutions() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class UpBlock(nn.Module):
    """Change the width, then enlarge, then refine."""

    def __init__(
        self, in_channels: int, out_channels: int, num_layers: int, *, upsample: str, shortcut_eps: float
    ) -> None:
        super().__init__()
        if in_channels != out_channels:
            self.conv_in = ResBlock(in_channels, out_channels, shortcut_eps=shortcut_eps, use_relu=False)
        enlarges = upsample != "none"
        if enlarges:
            self.upsamplers = nn.ModuleList([Upsampler(out_channels, with_time=upsample == "time_space")])
        self.resnets = nn.ModuleList(
            ResBlock(out_channels, out_channels, shortcut_eps=shortcut_eps, use_relu=enlarges)
            for _ in range(num_layers)
        )

    def forward(self, x_BCTYX: Tensor, *, is_first: bool) -> Tensor:
        if hasattr(self, "conv_in"):
            x_BCTYX = self.conv_in(x_BCTYX)
        if hasattr(self, "upsamplers"):
            x_BCTYX = self.upsamplers[0](x_BCTYX, is_first=is_first)
        for block in self.resnets:
            x_BCTYX = block(x_BCTYX)
        return x_BCTYX


class MidBlock(nn.Module):
    """The residual blocks at latent size."""

    def __init__(self, channels: int, num_layers: int, *, shortcut_eps: float) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResBlock(channels, channels, shortcut_eps=shortcut_eps, use_relu=False) for _ in range(num_layers)
        )

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        for block in self.resnets:
            x_BCTYX = block(x_BCTYX)
        return x_BCTYX


class TurboNetwork(nn.Module):
    """One call of the decoder: raw latents in, unclamped pixels out.

    Source: the reference, its TurboVAE decoder. Differs: nothing; attributes are named as in the checkpoint.
    """

    def __init__(self, config: TurboConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = EdgeConv3d(LATENT_CHANNELS, widths[0], (3, 3, 3))
        self.mid_block = MidBlock(widths[0], config.num_mid_layers, shortcut_eps=config.shortcut_eps)
        blocks = zip((widths[0], *widths), widths, config.num_layers, config.upsamples, strict=False)
        self.up_blocks = nn.ModuleList(
            UpBlock(into, out, num_layers, upsample=upsample, shortcut_eps=config.shortcut_eps)
            for into, out, num_layers, upsample in blocks
        )
        self.conv_out = EdgeConv3d(widths[-1], 3 * _PATCH**2, (3, 3, 3))

    def forward(self, latent_BZTYX: Tensor, *, is_first: bool) -> Tensor:
        """Decode one window.

        Args:
            latent_BZTYX: the weights' dtype, [1, 48, T, Y, X], denormalised.
            is_first: The window begins the clip: 4T - 3 frames come out instead of 4T.

        Returns:
            The same dtype, [1, 3, frames, 16Y, 16X].
        """
        hidden = self.mid_block(self.conv_in(latent_BZTYX))
        for block in self.up_blocks:
            hidden = block(hidden, is_first=is_first)
        return _unpatchify(self.conv_out(_silu_(rms_norm(hidden, _NORM_EPS))))


def _silu_(x: Tensor) -> Tensor:
    return functional.silu(x, inplace=True)


def _unpatchify(x_BCTYX: Tensor) -> Tensor:
    """Spread channels over 2x2 cells; inside a colour the column is the slower index."""
    batch, channels, time, rows, columns = x_BCTYX.shape
    cells = x_BCTYX.view(batch, channels // _PATCH**2, _PATCH, _PATCH, time, rows, columns)
    return cells.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, time, rows * _PATCH, columns * _PATCH)
