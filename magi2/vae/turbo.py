"""The video decoder: TurboVAE, from video latents to frames, in overlapping windows of latent frames.

Promises: strict loading; the windowed decode of the reference, one window at a time, so that a caller may
stop between windows or spread them over ranks. What it returns as floats is not clamped. It has no whole-clip
and no spatially tiled decode: both would be other functions.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from magi2.errors import CheckpointError
from magi2.parallel import patch
from magi2.parallel.groups import ALONE, Group
from magi2.vae import tiling, weights
from magi2.vae.constants import LATENT_CHANNELS, SPATIAL_FACTOR, denormalize
from magi2.vae.pixels import to_uint8
from magi2.vae.turbo_network import TurboConfig, TurboNetwork

logger = logging.getLogger(__name__)

CONFIG_NAME = "TurboV3-Wan22-TinyShallow_7_7.json"
CHECKPOINT_NAME = "checkpoint.ckpt"

_PREFIX = "decoder."
# Part of the training state beside the decoder; nothing else may be there.
_LEFT_OUT = ("aligned_feature_projection_heads.",)
_MIN_CUDNN = 91500


class TurboDecoder:
    """The loaded video decoder.

    Attributes:
        module: The network with its weights; it may be moved between devices at any time between two calls.
        config: The shape and the window.
    """

    def __init__(self, module: TurboNetwork, config: TurboConfig) -> None:
        self.module = module
        self.config = config

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
    ) -> "TurboDecoder":
        """Read the configuration and the weights of a `turbo_vae` folder.

        Raises:
            CheckpointError: A file is missing, unsafe or damaged, or does not fit.
        """
        if torch.device(device).type == "cuda":
            _warn_of_old_cudnn()
        config = TurboConfig.from_json(weights.read_json(directory / CONFIG_NAME), source=CONFIG_NAME)
        with torch.device("meta"):
            module = TurboNetwork(config)
        path = directory / CHECKPOINT_NAME
        shapes = {f"{_PREFIX}{name}": value.shape for name, value in module.state_dict().items()}
        state = trained_tensors(weights.read_pickle(path), path)
        tensors = weights.fit(state, shapes, left_out=_LEFT_OUT, path=path)
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
        return cls(weights.install(module, own, dtype=dtype, device=device), config)

    def windows(self, latent_BZTYX: Tensor) -> list[tiling.Window]:
        """Lay out the calls that decode this latent."""
        return tiling.plan_windows(latent_BZTYX.shape[2], self.config.first_chunk_size, self.config.step_size)

    def prepare(self, latent_BZTYX: Tensor) -> Tensor:
        """Denormalise a latent and repeat its last frame up to the end of the last window.

        Args:
            latent_BZTYX: any float dtype, [1, 48, T, Y, X], as the sampler returns it.

        Returns:
            The weights' dtype on their device, [1, 48, padded T, Y, X].

        Raises:
            ValueError: Not one clip of 48 channels.
        Source: the reference, which rounds the latent to the weights' dtype both before and after.
        """
        shape = latent_BZTYX.shape
        if len(shape) != 5 or shape[:2] != (1, LATENT_CHANNELS) or 0 in shape:
            raise ValueError(
                f"a latent of shape [1, {LATENT_CHANNELS}, T, Y, X] is needed, got {list(shape)}"
            )
        weight = self.module.conv_in.conv.weight
        latent = denormalize(latent_BZTYX.to(weight.device, weight.dtype).float()).to(weight.dtype)
        padded = tiling.padded_length(shape[2], self.config.first_chunk_size, self.config.step_size)
        return torch.cat((latent, latent[:, :, -1:].expand(-1, -1, padded - shape[2], -1, -1)), dim=2)

    @torch.no_grad()
    def decode_window(self, prepared_BZTYX: Tensor, window: tiling.Window) -> Tensor:
        """Decode one window of a prepared latent and cut it to the frames that are kept.

        Returns:
            The weights' dtype, [1, 3, window.num_kept, 16Y, 16X], unclamped.
        """
        video = self.module(prepared_BZTYX[:, :, window.start : window.stop], is_first=window.is_first)
        kept: Tensor = video[:, :, window.keep_start : window.keep_stop]
        return kept

    def decode(self, latent_BZTYX: Tensor, group: Group = ALONE) -> Iterator[Tensor]:
        """Decode a latent into RGB frames, one window per step of the iterator.

        Args:
            latent_BZTYX: any float dtype, [1, 48, T, Y, X], as the sampler returns it.
            group: Ranks that share the windows, each with the same latent; the first one gets the frames.

        Yields:
            uint8 [n, 16Y, 16X, 3] on the CPU, in order; 4T - 3 frames together. On other ranks nothing.
        """
        prepared = self.prepare(latent_BZTYX)
        windows = self.windows(latent_BZTYX)
        rows, columns = (SPATIAL_FACTOR * size for size in latent_BZTYX.shape[3:])

        def make(index: int) -> Tensor:
            return to_uint8(self.decode_window(prepared, windows[index])).cpu()

        owners = patch.assign([window.stop - window.start for window in windows], group.size)
        shapes = [(window.num_kept, rows, columns, 3) for window in windows]
        yield from patch.spread(group, owners, shapes, make)

    def decode_float(self, latent_BZTYX: Tensor) -> Tensor:
        """Decode a latent into the weights' dtype, [1, 3, 4T - 3, 16Y, 16X] on their device, unclamped."""
        prepared = self.prepare(latent_BZTYX)
        pieces = [self.decode_window(prepared, window) for window in self.windows(latent_BZTYX)]
        return torch.cat(pieces, dim=2)


def trained_tensors(state: Mapping[str, object], path: Path) -> dict[str, object]:
    """Choose the averaged weights of a training state if it has any; names lose the prefix `module.`."""
    name = next((n for n in ("ema_state_dict", "state_dict") if n in state), None)
    chosen = state if name is None else state[name]
    if not isinstance(chosen, Mapping):
        raise CheckpointError(
            f"{path.name}: {name} is a {type(chosen).__name__}, not a dictionary of tensors"
        )
    return {str(key).removeprefix("module."): value for key, value in chosen.items()}


def _warn_of_old_cudnn() -> None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call] # torch leaves it untyped
    if version is not None and version < _MIN_CUDNN:
        logger.warning("cudnn_slow_for_bf16_conv3d version=%d wanted=%d", version, _MIN_CUDNN)
