"""The percentage that a user sees: fixed shares, linear in finished steps, never 100 before the end."""

from itertools import pairwise

import pytest

from farm.jobs.phases import PHASES, Progress


@pytest.mark.parametrize(
    ("phase", "step", "total", "percent"),
    [
        ("load", 0, 0, 0),
        ("fetch_input", 0, 0, 1),
        ("text_encode", 0, 0, 2),
        ("image_encode", 1, 1, 4),
        ("denoise", 0, 100, 5),
        ("denoise", 50, 100, 47),
        ("denoise", 100, 100, 90),
        ("decode_audio", 0, 1, 91),
        ("decode_video", 0, 9, 92),
        ("decode_video", 9, 9, 96),
        ("mux", 1, 1, 97),
        ("upload", 0, 0, 98),
        ("upload", 1, 1, 99),
    ],
)
def test_percent_of_a_phase(phase, step, total, percent):
    assert Progress(phase, step, total).percent == percent


@pytest.mark.parametrize(
    ("phase", "step", "denoised"),
    [("load", 1, 0), ("image_encode", 1, 0), ("denoise", 3, 3), ("decode_video", 3, None)],
)
def test_only_denoising_steps_count_as_steps_of_a_job(phase, step, denoised):
    assert Progress(phase, step, 5).denoised == denoised


def test_a_render_never_goes_backwards():
    reports = [Progress(phase, step, 10).percent for phase in PHASES for step in range(11)]
    assert all(earlier <= later for earlier, later in pairwise(reports))


def test_nonsense_steps_stay_within_the_phase():
    assert Progress("denoise", 999, 100).percent == 90
    assert Progress("denoise", -5, 100).percent == 5


def test_an_unknown_phase_counts_as_the_beginning():
    assert Progress("dreaming", 5, 10).percent == 0
