"""On one CUDA device: the text tower in strict mode, the noise draw and the solver."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from magi2.checkpoint.tiny_text import write_text_encoder
from magi2.contract import TIERS
from magi2.sampling.noise import draw_noise
from magi2.sampling.unipc import FlowUniPC, schedule
from magi2.text.qwen35 import TextEncoder
from tests import tolerances

TEXT = "A tea seller pours one cup and a dog barks once. " * 5


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_tower_runs_in_strict_mode_and_repeats_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "text_encoder"
    write_text_encoder(folder, width=64, seed=3)
    tower = TextEncoder.load(folder, dtype, "cuda")
    first = tower.encode(TEXT).features
    assert first.is_cuda
    assert torch.equal(first, tower.encode(TEXT).features)


def test_text_tower_agrees_with_the_cpu_in_fp32(tmp_path: Path) -> None:
    folder = tmp_path / "text_encoder"
    write_text_encoder(folder, width=64, seed=3)
    on_cpu = TextEncoder.load(folder, torch.float32, "cpu").encode(TEXT).features
    on_cuda = TextEncoder.load(folder, torch.float32, "cuda").encode(TEXT).features
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, **tolerances.TEXT_FEATURES_FP32)


def test_noise_of_the_device_repeats_and_equals_the_process_generator() -> None:
    noise = draw_noise(7, TIERS["540p"], "cuda")
    torch.cuda.manual_seed(7)
    assert torch.equal(noise.video, torch.randn(noise.video.shape, device="cuda"))
    assert torch.equal(noise.audio, torch.randn(noise.audio.shape, device="cuda"))
    assert torch.equal(noise.video, draw_noise(7, TIERS["540p"], "cuda").video)


def test_solver_agrees_with_the_cpu() -> None:
    plan = schedule(20, 7.0)
    velocities = torch.randn(20, 1, 4, 3, 5, generator=torch.Generator().manual_seed(1))
    on_cpu, on_cuda = FlowUniPC(plan), FlowUniPC(plan)
    state = torch.randn(1, 4, 3, 5, generator=torch.Generator().manual_seed(2))
    device_state = state.cuda()
    for velocity in velocities:
        state = on_cpu.step(velocity, state)
        device_state = on_cuda.step(velocity.cuda(), device_state)
        torch.testing.assert_close(device_state.cpu(), state, **tolerances.SOLVER_STATES)
