import pytest

from worker.liveness import RankWatch, StallLimits

LIMITS = StallLimits()


@pytest.mark.parametrize(
    ("phase", "step", "median_step_s", "on_cpu", "limit_s"),
    [
        ("load", 0, 0, False, 1800),
        ("text_encode", 0, 0, True, 1800),
        ("text_encode", 0, 0, False, 180),
        ("denoise", 0, 0, False, 600),
        ("denoise", 3, 2, False, 60),
        ("denoise", 3, 6, False, 60),
        ("denoise", 3, 7, False, 70),
        ("decode_video", 1, 7, False, 180),
        ("mux", 0, 7, True, 180),
        ("idle", 0, 0, False, 180),
    ],
)
def test_limits_of_the_phases(phase, step, median_step_s, on_cpu, limit_s):
    assert LIMITS.limit_s(phase, step, median_step_s, on_cpu=on_cpu) == limit_s


def tick(marks, phase="denoise", step=0):
    return {"marks": marks, "phase": phase, "step": step}


def test_ticks_without_progress_do_not_keep_a_rank_alive():
    watch = RankWatch(progress_at=0.0)
    watch.saw_tick(tick(1), now=1.0)
    for now in range(2, 700):
        watch.saw_tick(tick(1), now=float(now))
    assert "no progress for 699.0 s in denoise after step 0 (limit 600.0 s)" in watch.stall(
        LIMITS, 700.0, on_cpu=False
    )


def test_count_that_moves_keeps_a_rank_alive_for_ever():
    watch = RankWatch(progress_at=0.0)
    for now in range(1, 5000, 50):
        watch.saw_tick(tick(now), now=float(now))
        assert watch.stall(LIMITS, now + 49.0, on_cpu=False) is None


def test_silence_is_a_stall_too():
    watch = RankWatch(progress_at=0.0, phase="mux")
    assert watch.stall(LIMITS, 180.0, on_cpu=False) is None
    assert watch.stall(LIMITS, 180.1, on_cpu=False) is not None


def test_median_step_is_measured_between_reports():
    watch = RankWatch(progress_at=0.0)
    for step, now in enumerate([10.0, 20.0, 30.0, 40.0, 90.0]):
        watch.saw_work("denoise", step, now)
    assert watch.median_step_s == 10.0
    assert watch.stall(LIMITS, 190.0, on_cpu=False) is None
    assert watch.stall(LIMITS, 190.1, on_cpu=False) is not None


def test_steps_that_were_not_reported_one_by_one_are_averaged():
    watch = RankWatch(progress_at=0.0)
    watch.saw_work("denoise", 2, 10.0)
    watch.saw_work("denoise", 6, 18.0)
    assert watch.median_step_s == 2.0


def test_time_between_two_runs_is_no_step():
    watch = RankWatch(progress_at=0.0)
    watch.saw_work("denoise", 0, 1.0)
    watch.saw_work("denoise", 1, 3.0)
    watch.saw_work("mux", 0, 4.0)
    watch.begin_run(1000.0)
    watch.saw_work("denoise", 0, 1001.0)
    assert watch.median_step_s == 2.0


def test_first_step_of_every_run_has_its_own_limit():
    watch = RankWatch(progress_at=0.0)
    for step, now in enumerate([1.0, 2.0, 3.0]):
        watch.saw_work("denoise", step, now)
    watch.begin_run(100.0)
    watch.saw_work("denoise", 0, 100.0)
    assert watch.stall(LIMITS, 699.0, on_cpu=False) is None
