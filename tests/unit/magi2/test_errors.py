"""The engine's failures say what happened, keep their parts and cross a process boundary."""

import pickle

import pytest

from magi2.contract import Problem
from magi2.errors import (
    CheckpointError,
    EngineError,
    EngineFailure,
    InvalidInput,
    LayoutError,
    OutOfMemory,
    Stopped,
)

PROBLEMS = [Problem("seed", "seed_invalid", "seed must be small"), Problem("n", "num_outputs", "one clip")]


def test_invalid_input_says_all_problems() -> None:
    error = InvalidInput(PROBLEMS)
    assert error.problems == PROBLEMS
    assert str(error) == "seed must be small; one clip"


def test_invalid_input_may_be_one_sentence() -> None:
    assert (str(InvalidInput("no words")), InvalidInput("no words").problems) == ("no words", [])


def test_checkpoint_error_says_a_line_for_each_problem() -> None:
    error = CheckpointError(["missing a", "missing b"])
    assert str(error) == "missing a\nmissing b"
    assert CheckpointError("missing a").problems == ["missing a"]


def test_out_of_memory_says_need_and_rest_in_mebibytes() -> None:
    assert "3 MiB needed, 2 MiB free" in str(OutOfMemory(2 * 2**20, 3 * 2**20, "cuda:1"))


@pytest.mark.parametrize(
    "error",
    [
        *(InvalidInput(PROBLEMS), InvalidInput("x"), CheckpointError(["a", "b"]), OutOfMemory(1, 2, "host")),
        *(LayoutError("tp"), EngineError("e"), Stopped("after step 3")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failure_survives_pickling(error: EngineFailure) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
