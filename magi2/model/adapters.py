"""Into the streams and out of them: embedders with time channels, and the two output heads.

Promises: fp32 throughout; the caller rounds once on entry. Time channels overwrite the first channels of
the first stream, for every row. Heads exist for video and audio only.
"""

import torch
from torch import Tensor, nn

from magi2 import packing
from magi2.config import ModelConfig
from magi2.model.embed import RotaryTable
from magi2.model.linear import ModalityNorm, parameter


class Embedder(nn.Module):
    """A matrix with a bias, fp32: the only biases of the model."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=torch.float32)
        self.bias = parameter(out_features, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Map fp32 rows [n, in] to [n, out]."""
        return nn.functional.linear(x.float(), self.weight, self.bias)


class PreAdapter(nn.Module):
    """Embeds the rows of each modality as the streams' first state, and makes the rotary table."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.video_embedder = Embedder(config.video_in_channels, config.stream_width)
        self.text_embedder = Embedder(config.text_in_channels, config.stream_width)
        self.audio_embedder = Embedder(config.audio_in_channels, config.stream_width)
        self.rope = RotaryTable(config.num_bands)

    def forward(self, rows: Tensor, modality: int, time_row: Tensor) -> Tensor:
        """Embed rows [n, channels] of one modality and overwrite their time channels.

        Args:
            rows: fp32.
            modality: Whose embedder.
            time_row: fp32 [w], the same for all rows; w may be 0.

        Returns:
            fp32 [n, S * C].
        """
        embedder = (self.video_embedder, self.audio_embedder, self.text_embedder)[modality]
        state: Tensor = embedder(rows)
        state[:, : time_row.shape[0]] = time_row
        return state


class PostAdapter(nn.Module):
    """Norms the last state and projects it to the channels of its modality."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.final_norm_video = ModalityNorm(config.stream_width, 1)
        self.final_norm_audio = ModalityNorm(config.stream_width, 1)
        self.final_linear_video = Head(config.stream_width, config.video_in_channels)
        self.final_linear_audio = Head(config.stream_width, config.audio_in_channels)

    def forward(self, state: Tensor, modality: int) -> Tensor:
        """Map rows [n, S * C] of video or audio to fp32 [n, channels]."""
        if modality == packing.VIDEO:
            video: Tensor = self.final_linear_video(self.final_norm_video(state, modality))
            return video
        audio: Tensor = self.final_linear_audio(self.final_norm_audio(state, modality))
        return audio


class Head(nn.Module):
    """A matrix without bias, fp32."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Map fp32 rows [n, in] to [n, out]."""
        return nn.functional.linear(x, self.weight)
