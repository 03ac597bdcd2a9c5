"""FlowUniPC: the released second-order predictor-corrector for flow matching.

Promises: the schedule and the states equal the reference's for every number of steps and any shift; all
of the solver's memory is in `state_dict`, so a run that is stored and continued gives the same bits. A
solver carries one latent; video and audio have one each. It knows neither the model nor guidance.

Flow convention: x = (1 - sigma) x0 + sigma noise, the velocity is noise - x0, alpha = 1 - sigma,
lambda = ln(alpha) - ln(sigma).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The fp32 value of 0.999: the reference's grid starts there, not at the decimal number.
_FIRST_LEVEL = float(np.float32(0.999))
_NUM_TRAIN_STEPS = 1000
# What a solver remembers, in the order in which it comes to be: the clean estimate of the last step, the
# (corrected) state which that step started from, and the clean estimate of the step before.
_MEMORY = ("previous", "corrected", "before_previous")


@dataclass(frozen=True)
class Schedule:
    """The noise levels of a run.

    Args:
        shift: What the levels were shifted by.
        sigmas: fp32 [num_steps + 1] on the CPU; the last is 0.
        timesteps: One integer for each step: what the model is told.
    """

    shift: float
    sigmas: Tensor
    timesteps: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Steps from noise to latents."""
        return len(self.timesteps)


def schedule(num_steps: int, shift: float) -> Schedule:
    """Return the released noise levels for a number of steps.

    Raises:
        ValueError: There is no step, or the shift is not positive.
    Source: the reference, inference/pipeline/sampler.py; levels in fp64, stored as fp32.
    """
    if num_steps < 1 or not shift > 0:
        raise ValueError(f"num_steps must be at least 1 and shift positive (got {num_steps} and {shift})")
    levels = np.linspace(_FIRST_LEVEL, 0, num_steps + 1, dtype=np.float64)[:-1]
    sigmas = shift * levels / (1 + (shift - 1) * levels)
    timesteps = tuple(int(t) for t in _NUM_TRAIN_STEPS * sigmas)
    return Schedule(shift, torch.from_numpy(np.append(sigmas, 0).astype(np.float32)), timesteps)


class FlowUniPC:
    """Advances one latent along a schedule, a velocity at a time.

    Source: the reference, inference/pipeline/sampler.py. Differs: starts at step 0 always (the reference
        looks its first timestep up, and from 168 steps on finds the wrong one); the corrector's system of two
        equations is solved in closed form.
    """

    def __init__(self, plan: Schedule) -> None:
        self.schedule = plan
        self.step_index = 0
        # fp32 scalars on the CPU: they enter tensor arithmetic as numbers and never wait for a device.
        self._sigmas: list[Tensor] = list(plan.sigmas)
        self._alphas: list[Tensor] = [1 - sigma for sigma in self._sigmas]
        self._lambdas: list[Tensor] = [torch.log(1 - sigma) - torch.log(sigma) for sigma in self._sigmas]
        self._memory: dict[str, Tensor] = {}

    def step(self, velocity: Tensor, sample: Tensor) -> Tensor:
        """Take one step.

        Args:
            velocity: fp32, the guided prediction at `sample`.
            sample: fp32, the current state: the noise, or what the last call returned.

        Returns:
            fp32, the next state; the clean latent after the last step.
        Raises:
            IndexError: All steps were taken.
        """
        index = self.step_index
        if index >= self.schedule.num_steps:
            raise IndexError(f"all {self.schedule.num_steps} steps were taken")
        clean = sample - self._sigmas[index] * velocity
        if index > 0:
            sample = self._correct(index, clean)
        following = self._predict(index, sample, clean)
        if index > 0:
            self._memory["before_previous"] = self._memory["previous"]
        self._memory |= {"previous": clean, "corrected": sample}
        self.step_index = index + 1
        return following

    def state_dict(self) -> dict[str, Any]:
        """Return all that a later solver needs to go on, as numbers and tensors; nothing is copied."""
        numbers = {
            "num_steps": self.schedule.num_steps,
            "shift": self.schedule.shift,
            "step": self.step_index,
        }
        return numbers | self._memory

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored state of the same schedule.

        Raises:
            ValueError: The state is another schedule's, or does not hold the tensors of its step.
        """
        own = (self.schedule.num_steps, self.schedule.shift)
        given = (state.get("num_steps"), state.get("shift"))
        if given != own:
            raise ValueError(f"the state is of (num_steps, shift) {given}; this solver's are {own}")
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= self.schedule.num_steps:
            raise ValueError(f"step must be an integer from 0 to {self.schedule.num_steps} (got {step})")
        wanted = _MEMORY[: (0, 2, 3)[min(step, 2)]]
        present = [name for name in _MEMORY if isinstance(state.get(name), Tensor)]
        if present != list(wanted):
            raise ValueError(f"a state at step {step} holds the tensors {list(wanted)} (got {present})")
        self.step_index = step
        self._memory = {name: state[name] for name in wanted}

    def _order(self, index: int) -> int:
        """Order of the predictor: lower at both ends, where history or grid end."""
        return min(2, self.schedule.num_steps - index, index + 1)

    def _correct(self, index: int, clean: Tensor) -> Tensor:
        """Repeat the last step (UniC, B(h) = expm1(-h)), now that the clean estimate at its end is known."""
        start, previous = self._memory["corrected"], self._memory["previous"]
        lambdas, sigmas = self._lambdas, self._sigmas
        span = lambdas[index] - lambdas[index - 1]
        growth = torch.expm1(-span)
        factor = self._alphas[index] * growth
        base: Tensor = sigmas[index] / sigmas[index - 1] * start - factor * previous
        change = clean - previous
        if self._order(index - 1) == 1:
            return base - factor * (0.5 * change)
        ratio = (lambdas[index - 2] - lambdas[index - 1]) / span
        earlier = (self._memory["before_previous"] - previous) / ratio
        first = growth / -span - 1
        b1, b2 = first / growth, 2 * (first / -span - 0.5) / growth
        rho1, rho2 = (b1 - b2) / (1 - ratio), (b2 - ratio * b1) / (1 - ratio)
        return base - factor * (rho1 * earlier + rho2 * change)

    def _predict(self, index: int, sample: Tensor, clean: Tensor) -> Tensor:
        """Extrapolate to the next noise level (UniP); the last span is infinite and gives `clean` itself."""
        lambdas, sigmas = self._lambdas, self._sigmas
        span = lambdas[index + 1] - lambdas[index]
        factor = self._alphas[index + 1] * torch.expm1(-span)
        base: Tensor = sigmas[index + 1] / sigmas[index] * sample - factor * clean
        if self._order(index) == 1:
            return base
        ratio = (lambdas[index - 1] - lambdas[index]) / span
        return base - factor * (0.5 * ((self._memory["previous"] - clean) / ratio))
