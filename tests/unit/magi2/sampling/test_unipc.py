"""The solver: its grid for any number of steps, its state, and agreement with a second implementation."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from magi2.sampling.unipc import FlowUniPC, Schedule, schedule
from tests import tolerances

SHAPE = (1, 3, 4, 2, 5)


def noise(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def velocity_at(sample: Tensor, timestep: int) -> Tensor:
    """A smooth field that is neither linear nor symmetric."""
    return 0.7 * sample - 0.2 * sample.roll(1, -1) + 0.3 * torch.sin(1.3 * sample + 0.004 * timestep) - 0.1


def trajectory(solver: FlowUniPC, sample: Tensor) -> list[Tensor]:
    """All states from `sample` on, from the step at which the solver stands."""
    states = [sample]
    for timestep in solver.schedule.timesteps[solver.step_index :]:
        states.append(solver.step(velocity_at(states[-1], timestep), states[-1]))
    return states


@pytest.mark.parametrize(
    ("num_steps", "first", "last"),
    [
        *((1, [999], []), (2, [999, 874], []), (4, [999, 954, 874, 699], [])),
        *((20, [999, 992, 984, 975], [552, 437, 269]), (100, [999, 998, 996, 995], [177, 124, 65])),
    ],
)
def test_released_timesteps_are_those_of_the_published_table(
    num_steps: int, first: list[int], last: list[int]
) -> None:
    timesteps = schedule(num_steps, 7.0).timesteps
    assert len(timesteps) == num_steps
    assert list(timesteps[: len(first)]) == first
    assert list(timesteps[num_steps - len(last) :]) == last


@given(st.integers(1, 200), st.floats(0.1, 20))
def test_every_grid_falls_from_noise_to_zero(num_steps: int, shift: float) -> None:
    plan = schedule(num_steps, shift)
    assert plan.num_steps == num_steps
    assert plan.sigmas.dtype == torch.float32
    assert plan.sigmas.shape == (num_steps + 1,)
    assert bool((plan.sigmas.diff() < 0).all())
    assert plan.sigmas[-1] == 0
    assert all(0 < t < 1000 for t in plan.timesteps[:1])
    assert list(plan.timesteps) == sorted(plan.timesteps, reverse=True)


@pytest.mark.parametrize(
    ("num_steps", "shift"), [(0, 7.0), (-1, 7.0), (4, 0.0), (4, -1.0), (4, float("nan"))]
)
def test_impossible_grid_is_refused(num_steps: int, shift: float) -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 1 and shift positive"):
        schedule(num_steps, shift)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7, 50, 168, 200])
def test_solver_reaches_a_clean_latent_that_the_velocity_always_points_from(num_steps: int) -> None:
    clean, state = noise(1), noise(2)
    solver = FlowUniPC(schedule(num_steps, 7.0))
    for sigma in solver.schedule.sigmas[:-1]:
        state = solver.step((state - clean) / sigma, state)
    torch.testing.assert_close(state, clean, **tolerances.SOLVER_FIXED_POINT)


def test_one_step_subtracts_the_velocity() -> None:
    plan = schedule(1, 7.0)
    start, velocity = noise(1), noise(2)
    assert torch.equal(FlowUniPC(plan).step(velocity, start), start - plan.sigmas[0] * velocity)


@pytest.mark.parametrize("num_steps", [3, 100, 151, 152, 167, 168, 200])
def test_every_number_of_steps_gives_finite_states(num_steps: int) -> None:
    states = trajectory(FlowUniPC(schedule(num_steps, 7.0)), noise())
    assert len(states) == num_steps + 1
    assert all(bool(torch.isfinite(state).all()) for state in states)


def test_step_beyond_the_last_is_an_error() -> None:
    solver = FlowUniPC(schedule(1, 7.0))
    solver.step(noise(), noise())
    with pytest.raises(IndexError, match="all 1 steps were taken"):
        solver.step(noise(), noise())


def test_solver_changes_neither_its_input_nor_what_it_returned() -> None:
    states = trajectory(FlowUniPC(schedule(6, 7.0)), noise())
    again = trajectory(FlowUniPC(schedule(6, 7.0)), noise())
    assert all(torch.equal(a, b) for a, b in zip(states, again, strict=True))
    assert torch.equal(states[0], noise())


@pytest.mark.parametrize("finished", range(7))
def test_state_stored_between_steps_continues_with_the_same_bits(finished: int) -> None:
    plan = schedule(6, 7.0)
    want = trajectory(FlowUniPC(plan), noise())
    first = FlowUniPC(plan)
    for timestep, state in zip(plan.timesteps[:finished], want[:-1], strict=False):
        first.step(velocity_at(state, timestep), state)
    buffer = io.BytesIO()
    torch.save(first.state_dict() | {"sample": want[finished]}, buffer)
    buffer.seek(0)
    stored = torch.load(buffer, weights_only=True)
    second = FlowUniPC(plan)
    second.load_state_dict(stored)
    got = trajectory(second, stored["sample"])
    assert [t.numpy().tobytes() for t in got] == [t.numpy().tobytes() for t in want[finished:]]


def test_tensors_of_a_state_go_through_safetensors() -> None:
    solver = FlowUniPC(schedule(6, 7.0))
    trajectory_of_three = noise()
    for timestep in solver.schedule.timesteps[:3]:
        trajectory_of_three = solver.step(velocity_at(trajectory_of_three, timestep), trajectory_of_three)
    state = solver.state_dict()
    tensors = load(save({name: value for name, value in state.items() if isinstance(value, Tensor)}))
    assert set(tensors) == {"previous", "before_previous", "corrected"}
    other = FlowUniPC(schedule(6, 7.0))
    other.load_state_dict(state | tensors)
    assert torch.equal(
        trajectory(other, trajectory_of_three)[-1], trajectory(solver, trajectory_of_three)[-1]
    )


def state_at(step: int, num_steps: int = 6) -> dict[str, Any]:
    solver = FlowUniPC(schedule(num_steps, 7.0))
    for _ in range(step):
        solver.step(noise(), noise())
    return solver.state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (state_at(2, num_steps=5), "of \\(num_steps, shift\\) \\(5, 7.0\\)"),
        (state_at(2) | {"shift": 5.0}, "shift"),
        ({}, "num_steps"),
        (state_at(2) | {"step": 7}, "step must be an integer from 0 to 6"),
        (state_at(2) | {"step": "2"}, "step must be an integer"),
        (state_at(2) | {"step": 1}, "a state at step 1 holds"),
        (state_at(1) | {"step": 2}, "a state at step 2 holds"),
        (state_at(2) | {"previous": None}, "a state at step 2 holds"),
    ],
)
def test_state_that_does_not_fit_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowUniPC(schedule(6, 7.0)).load_state_dict(state)


def library_solver(plan: Schedule) -> Any:
    # Imported here: seconds, and only this comparison needs it.
    from diffusers import UniPCMultistepScheduler

    solver = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=plan.shift, lower_order_final=True
    )
    solver.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, plan.num_steps + 1)[:-1])
    return solver


@pytest.mark.parametrize(
    ("num_steps", "shift"), [(1, 7.0), (2, 7.0), (3, 5.0), (8, 1.0), (25, 7.0), (167, 7.0)]
)
def test_solver_agrees_with_the_library(num_steps: int, shift: float) -> None:
    plan = schedule(num_steps, shift)
    library = library_solver(plan)
    assert torch.equal(library.sigmas.float(), plan.sigmas)
    assert library.timesteps.tolist() == list(plan.timesteps)
    own, state = FlowUniPC(plan), noise()
    library_state = state
    for timestep in library.timesteps:
        state = own.step(velocity_at(state, int(timestep)), state)
        velocity = velocity_at(library_state, int(timestep))
        library_state = library.step(velocity, timestep, library_state, return_dict=False)[0]
        torch.testing.assert_close(state, library_state, **tolerances.SOLVER_STATES)
