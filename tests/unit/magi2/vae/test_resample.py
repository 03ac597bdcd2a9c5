"""Fourier resampling of known signals."""

import math

import pytest
import torch

from magi2.vae.resample import fourier_resample
from tests import tolerances


def test_clip_of_the_decoder_becomes_ten_seconds() -> None:
    assert fourier_resample(torch.zeros(1, 2, 512_000)).shape == (1, 2, 441_000)


def test_periodic_tone_keeps_its_frequency_and_level() -> None:
    cycles, num_in, num_out = 5, 2048, 1764
    angle_in = 2 * math.pi * cycles * torch.arange(num_in, dtype=torch.float64) / num_in
    angle_out = 2 * math.pi * cycles * torch.arange(num_out, dtype=torch.float64) / num_out
    got = fourier_resample(torch.sin(angle_in).float())
    torch.testing.assert_close(got, torch.sin(angle_out).float(), **tolerances.RESAMPLE)


def test_tone_above_the_new_band_disappears() -> None:
    angle = 2 * math.pi * 1000 * torch.arange(2048, dtype=torch.float64) / 2048
    assert fourier_resample(torch.sin(angle).float()).abs().max() < 1e-5


def test_tone_at_the_new_band_edge_is_folded_onto_it() -> None:
    # 882 cycles in 1764 samples is the highest frequency: the last kept bin, whose mirror image is added.
    angle = 2 * math.pi * 882 * torch.arange(2048, dtype=torch.float64) / 2048
    got = fourier_resample(torch.cos(angle).float())
    want = torch.tensor([1.0, -1.0]).repeat(882)
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("num_in", "up", "down"), [(100, 2, 1), (100, 1, 1), (100, 0, 1), (1, 441, 512)])
def test_rates_that_do_not_fall_are_refused(num_in: int, up: int, down: int) -> None:
    with pytest.raises(ValueError, match="cannot resample"):
        fourier_resample(torch.zeros(num_in), up, down)
