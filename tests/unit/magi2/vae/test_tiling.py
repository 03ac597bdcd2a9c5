"""The window plan for any window shape, beyond the recorded ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magi2.vae.tiling import num_frames, padded_length, plan_windows


def test_plan_of_the_released_clip() -> None:
    windows = plan_windows(32, 7, 7)
    assert [(w.start, w.stop) for w in windows] == [(0, 8), (6, 15), (13, 22), (20, 29), (27, 35)]
    assert [(w.keep_start, w.keep_stop) for w in windows] == [(0, 25), (4, 32), (4, 32), (4, 32), (4, 20)]
    assert [w.is_first for w in windows] == [True, False, False, False, False]


@given(num_latents=st.integers(1, 80), first=st.integers(1, 9), step=st.integers(1, 9))
def test_windows_keep_each_frame_of_the_clip_once(num_latents: int, first: int, step: int) -> None:
    windows = plan_windows(num_latents, first, step)
    assert sum(window.num_kept for window in windows) == num_frames(num_latents)
    assert windows[-1].stop == padded_length(num_latents, first, step)
    for window in windows:
        made = 4 * (window.stop - window.start) - (3 if window.is_first else 0)
        assert 0 <= window.keep_start < window.keep_stop <= made


@pytest.mark.parametrize("numbers", [(0, 7, 7), (1, 0, 7), (1, 7, 0)])
def test_numbers_that_are_not_positive_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        plan_windows(*numbers)
