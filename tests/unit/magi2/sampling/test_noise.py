"""The noise of a clip: one generator, video first, and nothing left behind."""

import pytest
import torch

from magi2.contract import MAX_SEED, TIERS
from magi2.sampling.noise import draw_noise


@pytest.mark.parametrize(
    ("name", "video_shape"), [("272p", (1, 48, 32, 16, 28)), ("540p", (1, 48, 32, 32, 56))]
)
def test_noise_has_the_shapes_of_the_tier(name: str, video_shape: tuple[int, ...]) -> None:
    noise = draw_noise(1, TIERS[name], "cpu")
    assert (noise.video.shape, noise.audio.shape) == (video_shape, (1, 250, 64))
    assert noise.video.dtype == noise.audio.dtype == torch.float32


def test_video_is_drawn_before_audio_from_one_generator() -> None:
    torch.manual_seed(7)
    video, audio = torch.randn(1, 48, 32, 16, 28), torch.randn(1, 250, 64)
    noise = draw_noise(7, TIERS["272p"], "cpu")
    assert torch.equal(noise.video, video)
    assert torch.equal(noise.audio, audio)


@pytest.mark.parametrize("seed", [0, 2**53, MAX_SEED])
def test_one_seed_gives_one_noise(seed: int) -> None:
    first, second = draw_noise(seed, TIERS["272p"], "cpu"), draw_noise(seed, TIERS["272p"], "cpu")
    other = draw_noise(seed ^ 1, TIERS["272p"], "cpu")
    assert torch.equal(first.video, second.video)
    assert torch.equal(first.audio, second.audio)
    assert not torch.equal(first.video, other.video)


def test_generator_of_the_process_is_neither_read_nor_moved() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = draw_noise(5, TIERS["272p"], "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(draw_noise(5, TIERS["272p"], "cpu").audio, first.audio)


def test_latents_move_between_devices() -> None:
    moved = draw_noise(1, TIERS["272p"], "cpu").to("meta")
    assert moved.video.is_meta
    assert moved.audio.is_meta
