"""Progress as lines."""

from farm.commands.progress import ProgressLines


def lines_of(*videos: dict) -> list[str]:
    lines: list[str] = []
    progress = ProgressLines(lines.append)
    for video in videos:
        progress.show(video)
    return lines


def test_each_denoising_step_is_shown_once() -> None:
    step = {"state": "running", "phase": "denoise", "total_steps": 4, "attempt": 1}
    shown = lines_of(
        *({**step, "step": number, "progress": 5 + number} for number in (0, 1, 1, 2, 3, 3, 4)),
    )
    assert [line.split("%  ")[1] for line in shown] == [f"denoise step {number}/4" for number in range(5)]


def test_steps_that_a_poll_missed_are_shown_too() -> None:
    running = {"state": "running", "total_steps": 4, "attempt": 1, "progress": 0}
    shown = lines_of(
        {**running, "phase": "denoise", "step": 0},
        {**running, "phase": "denoise", "step": 2},
        {**running, "phase": "decode_video", "step": 4},
        {**running, "phase": "decode_video", "step": 4},
    )
    assert [line.split("%  ")[1] for line in shown] == [
        *(f"denoise step {number}/4" for number in range(5)),
        "running: decode_video",
    ]


def test_next_attempt_starts_at_its_own_first_step() -> None:
    running = {"state": "running", "phase": "denoise", "total_steps": 2, "progress": 0}
    shown = lines_of({**running, "step": 1, "attempt": 1}, {**running, "step": 0, "attempt": 2})
    assert [line.split("%  ")[1] for line in shown] == [
        "denoise step 0/2",
        "denoise step 1/2",
        "denoise step 0/2",
    ]


def test_phases_and_states_are_named() -> None:
    shown = lines_of(
        {"state": "queued", "phase": None, "step": 0, "progress": 0},
        {"state": "starting", "phase": "load", "step": 0, "progress": 1},
        {"state": "running", "phase": "decode_video", "step": 4, "progress": 92},
        {"state": "uploading", "phase": "mux", "step": 4, "progress": 98},
        {"state": "succeeded", "phase": None, "step": 4, "progress": 100},
    )
    assert [line.split("%  ")[1] for line in shown] == [
        "queued",
        "starting: load",
        "running: decode_video",
        "uploading",
        "succeeded",
    ]


def test_second_attempt_is_called_so() -> None:
    shown = lines_of({"state": "queued", "phase": None, "step": 0, "progress": 0, "attempt": 2})
    assert shown == ["  0%  queued (attempt 2)"]
