import pytest

from worker.board import RankBoard, Run, first_cause
from worker.engine_api import EngineError, RenderResult
from worker.liveness import StallLimits


def result(token="t", **outcomes):
    return {"type": "result", "token": token, "outcomes": outcomes}


GOOD = {"path": "/x.mp4", "stats": {}}
BAD = {"fault": {"kind": "engine_error", "message": "no"}}


@pytest.fixture
def board():
    board = RankBoard(2)
    for rank in (0, 1):
        board.take(rank, {"type": "ready", "fingerprint": {"rank": str(rank)}})
    return board


def test_group_is_loaded_when_every_rank_is():
    board = RankBoard(2)
    board.take(1, {"type": "ready", "fingerprint": {"rank": "1"}})
    assert not board.is_loaded
    board.take(0, {"type": "ready", "fingerprint": {"rank": "0"}})
    assert board.is_loaded
    assert board.fingerprint == {"rank": "0"}


def test_first_failure_is_the_one_that_is_told(board):
    board.take(1, {"type": "crash", "message": "OSError: disk", "phase": "mux"})
    board.take(1, None)
    board.take(0, None)
    assert (board.crash.rank, board.crash.message, board.crash.details["phase"]) == (
        1,
        "OSError: disk",
        "mux",
    )
    assert not board.is_loaded


@pytest.mark.parametrize(("exit_codes", "cause"), [((70, -9), 1), ((70, 3), 1), ((-9, 70), 0), ((70, 70), 1)])
def test_cause_is_the_silent_end_or_else_the_earliest_word(board, exit_codes, cause):
    board.take(0, {"type": "crash", "message": "ConnectionError: a peer is gone", "at_s": 8.0})
    board.take(1, {"type": "crash", "message": "MemoryError", "at_s": 7.0} if exit_codes[1] == 70 else None)
    crashes = board.wait_for_crashes(2, timeout_s=0)
    found = first_cause({crash: exit_codes[crash.rank] for crash in crashes})
    assert (found.rank, len(crashes)) == (cause, 2)
    assert "at_s" not in found.details


def test_run_is_over_when_rank_0_has_answered_and_all_are_done(board):
    run = Run("t", ["a"])
    board.begin(run)
    board.take(0, result(a=GOOD))
    assert board.look(run)[1:] == ({"a": RenderResult("/x.mp4", {})}, False)
    board.take(1, {"type": "done", "token": "t", "outcomes": {"a": GOOD}})
    assert board.look(run)[2]


def test_answers_of_another_run_are_dropped(board):
    run = Run("new", ["a"])
    board.begin(run)
    board.take(0, result("old", a=GOOD))
    board.take(
        0, {"type": "progress", "token": "old", "request_id": "a", "phase": "mux", "step": 0, "total": 1}
    )
    assert board.look(run) == ([], None, False)


def test_defect_08_reply_of_a_wave_that_is_over_is_never_taken_for_the_next_one(board):
    board.begin(Run("first", ["a"]))
    board.begin(second := Run("second", ["a"]))
    board.take(0, result("first", a=GOOD))
    board.take(1, {"type": "done", "token": "first", "outcomes": {}})
    assert board.look(second)[1] is None
    board.take(0, result("second", a=BAD))
    assert isinstance(board.look(second)[1]["a"], EngineError)


def test_newest_report_is_handed_out_once(board):
    run = Run("t", ["a"])
    board.begin(run)
    for step in (1, 2):
        board.take(
            0,
            {
                "type": "progress",
                "token": "t",
                "request_id": "a",
                "phase": "denoise",
                "step": step,
                "total": 9,
            },
        )
    assert [report.step for report in board.look(run)[0]] == [2]
    assert board.look(run)[0] == []


def test_fault_of_another_rank_is_kept_for_those_that_wait(board):
    run = Run("t", ["a"])
    board.begin(run)
    board.take(1, {"type": "done", "token": "t", "outcomes": {"a": BAD}})
    assert isinstance(run.fault, EngineError)


def test_answer_that_forgets_a_request_breaks_the_protocol(board):
    board.begin(Run("t", ["a", "b"]))
    board.take(0, result(a=GOOD))
    assert "no outcome for ['b']" in board.crash.message


@pytest.mark.parametrize(
    "message",
    [
        {"type": "tick"},
        {"type": "tick", "marks": "many", "phase": "idle", "step": 0},
        {"type": "hail"},
        {"type": "ready", "fingerprint": 3},
        {"type": "result", "token": "t", "outcomes": {"a": {}}},
    ],
)
def test_message_that_makes_no_sense_is_a_crash_of_that_rank(board, message):
    board.begin(Run("t", ["a"]))
    board.take(1, message)
    assert board.crash.rank == 1
    assert "broke the protocol" in board.crash.message


def test_ping_counts_when_all_have_answered_this_one(board):
    board.take(0, {"type": "pong", "n": 2})
    board.take(1, {"type": "pong", "n": 1})
    assert not board.have_answered(2)
    board.take(1, {"type": "pong", "n": 2})
    assert board.have_answered(2)


def test_stall_names_the_rank(board):
    limits = StallLimits(other_s=-1.0, first_step_s=1e9)
    board.begin(Run("t", ["a"]))
    board.take(0, {"type": "tick", "marks": 1, "phase": "denoise", "step": 0})
    assert board.stall(limits, on_cpu=True).startswith("rank 1: no progress")
