"""The noise a clip starts from, and the pair of latents that the sampler carries.

Promises: one generator per request, seeded with the request's seed; the video is drawn first, the audio
second, both fp32. A CPU generator gives the same numbers everywhere, a CUDA generator only on GPUs of
one model. Nothing else in the engine draws random numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from magi2.contract import NUM_AUDIO_LATENTS, NUM_LATENT_FRAMES, Tier

VIDEO_CHANNELS = 48
AUDIO_CHANNELS = 64


@dataclass(frozen=True)
class Latents:
    """The two latents of one clip: video fp32 [1, Z, T, Y, X] and audio fp32 [1, A, Z]."""

    video: Tensor
    audio: Tensor

    def to(self, device: torch.device | str) -> "Latents":
        """Return the latents on another device."""
        return Latents(self.video.to(device), self.audio.to(device))


def draw_noise(seed: int, tier: Tier, device: torch.device | str) -> Latents:
    """Draw a clip's noise on the device whose generator the request's record names.

    Source: the reference, inference/pipeline/inference_engine.py. Differs: a generator of its own
        instead of the process-wide one, which gives the same numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    video_shape = (1, VIDEO_CHANNELS, NUM_LATENT_FRAMES, tier.latent_height, tier.latent_width)
    audio_shape = (1, NUM_AUDIO_LATENTS, AUDIO_CHANNELS)
    video = torch.randn(video_shape, generator=generator, device=device, dtype=torch.float32)
    audio = torch.randn(audio_shape, generator=generator, device=device, dtype=torch.float32)
    return Latents(video, audio)
