"""The denoising loop: what it asks the model, when it reports and when it stops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from magi2.config import SamplingConfig
from magi2.errors import EngineError, Stopped
from magi2.sampling.loop import denoise
from magi2.sampling.noise import Latents
from magi2.sampling.unipc import FlowUniPC, schedule

VIDEO, AUDIO = torch.randn(1, 3, 2, 2, 2), torch.randn(1, 5, 4)


class Linear:
    """A model whose branches differ by a constant; it keeps the timesteps that it was asked for."""

    def __init__(self, *, gap: float = 0.25, value: float = 1.0) -> None:
        self.gap = gap
        self.value = value
        self.timesteps: list[int] = []

    def predict(self, video: Tensor, audio: Tensor, timestep: int) -> tuple[Tensor, Tensor]:
        self.timesteps.append(timestep)
        rows = torch.tensor([self.gap, 0.0])
        return (
            self.value * video + rows.reshape(2, 1, 1, 1, 1),
            self.value * audio + rows.reshape(2, 1, 1),
        )


def run(model: Linear, *, num_steps: int = 4, **kwargs: Any) -> Latents:
    return denoise(model, VIDEO, AUDIO, num_steps=num_steps, sampling=SamplingConfig(), **kwargs)


def solved(start: Tensor, scale: float, model: Linear, num_steps: int) -> Tensor:
    solver, state = FlowUniPC(schedule(num_steps, 7.0)), start
    for _ in range(num_steps):
        state = solver.step(model.value * state + scale * model.gap, state)
    return state


def test_model_is_asked_once_a_step_at_the_integer_timesteps() -> None:
    model = Linear()
    run(model)
    assert model.timesteps == [999, 954, 874, 699]
    assert all(type(timestep) is int for timestep in model.timesteps)


def test_video_and_audio_have_their_own_scale_and_solver() -> None:
    model = Linear()
    latents = run(model, num_steps=5)
    torch.testing.assert_close(latents.video, solved(VIDEO, 5.0, model, 5))
    torch.testing.assert_close(latents.audio, solved(AUDIO, 7.0, model, 5))


def test_each_finished_step_is_reported() -> None:
    reports: list[tuple[int, int]] = []
    run(Linear(), on_step=lambda step, total: reports.append((step, total)))
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("finished", range(4))
def test_request_to_stop_ends_the_loop_between_steps(finished: int) -> None:
    model, reports = Linear(), []
    with pytest.raises(Stopped, match=f"stopped after step {finished} of 4"):
        run(model, on_step=lambda step, _: reports.append(step), should_stop=lambda: len(reports) == finished)
    assert len(model.timesteps) == finished == len(reports)


def test_request_to_stop_after_the_last_step_comes_too_late() -> None:
    model = Linear()
    latents = run(model, should_stop=lambda: len(model.timesteps) == 4)
    assert latents.video.shape == VIDEO.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_result_that_is_not_finite_is_a_failure(value: float) -> None:
    with pytest.raises(EngineError, match="not finite after 4 steps"):
        run(Linear(value=value))


def test_noise_is_left_as_it_was() -> None:
    video, audio = VIDEO.clone(), AUDIO.clone()
    run(Linear())
    assert torch.equal(video, VIDEO)
    assert torch.equal(audio, AUDIO)
