import json

import pytest

from worker.engine_api import (
    EngineError,
    InvalidInput,
    OutOfMemory,
    Stopped,
    fault_of,
    fault_to_json,
    make_engine,
)

PROBLEM = {"field": "prompt", "code": "prompt_too_long", "message": "prompt is 7001 tokens"}


@pytest.mark.parametrize(
    "fault",
    [
        InvalidInput([PROBLEM]),
        OutOfMemory(1, 2),
        OutOfMemory(None, None, "host"),
        EngineError("nan"),
        Stopped(),
    ],
)
def test_typed_errors_survive_the_pipe(fault):
    back = fault_of(json.loads(json.dumps(fault_to_json(fault))))
    assert (type(back), str(back), back.details()) == (type(fault), str(fault), fault.details())


def test_all_problems_are_in_the_text():
    fault = InvalidInput([PROBLEM, {**PROBLEM, "message": "the image must be at least 32x32"}])
    assert str(fault) == "prompt is 7001 tokens; the image must be at least 32x32"


def test_unknown_engine_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"'magi3'.*chaos, magi2, null"):
        make_engine("magi3")
