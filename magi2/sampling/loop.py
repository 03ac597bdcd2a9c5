"""The denoising loop: from noise to the latents of one clip.

It asks a `Denoiser` for both branches, guides, and lets one solver step the video and one the audio, on
the same timesteps. It reports each finished step and stops only between steps. It knows no model and
moves no tensor between devices.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from magi2.config import SamplingConfig
from magi2.errors import EngineError, Stopped
from magi2.packing import Denoiser
from magi2.sampling.guidance import guide
from magi2.sampling.noise import Latents
from magi2.sampling.unipc import FlowUniPC, schedule


def denoise(
    denoiser: Denoiser,
    video_noise: Tensor,
    audio_noise: Tensor,
    *,
    num_steps: int,
    sampling: SamplingConfig,
    on_step: Callable[[int, int], None] = lambda _step, _total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Latents:
    """Run all steps and return the clean latents.

    Args:
        denoiser: Predicts the velocity of both branches.
        video_noise: fp32 [1, Z, T, Y, X].
        audio_noise: fp32 [1, A, Z].
        num_steps: At least 1.
        sampling: Shift and guidance scales.
        on_step: Told (finished steps, num_steps) after each step.
        should_stop: Asked before each step.
    Raises:
        Stopped: `should_stop` said so.
        EngineError: The result holds a value that is not finite.
    Source: the reference, inference/pipeline/sampler.py. Differs: nothing.
    """
    plan = schedule(num_steps, sampling.shift)
    video_solver, audio_solver = FlowUniPC(plan), FlowUniPC(plan)
    video, audio = video_noise, audio_noise
    for step, timestep in enumerate(plan.timesteps):
        if should_stop():
            raise Stopped(f"stopped after step {step} of {num_steps}")
        video_prediction, audio_prediction = denoiser.predict(video, audio, timestep)
        video = video_solver.step(guide(video_prediction, sampling.video_guidance), video)
        audio = audio_solver.step(guide(audio_prediction, sampling.audio_guidance), audio)
        on_step(step + 1, num_steps)
    if not bool(torch.isfinite(video).all() & torch.isfinite(audio).all()):
        raise EngineError(f"the latents are not finite after {num_steps} steps; the clip was not made")
    return Latents(video, audio)
