"""What a model refuses is said in our words: the place, the rule, the value; never in pydantic's."""

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core.core_schema import ErrorType

from api.plain_words import problem_of


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    wait: Annotated[int, Field(ge=0, le=60)] = 0
    keep: bool = False
    name: Annotated[str, Field(min_length=1, max_length=4, pattern="^[a-z]*$")] = "a"
    tags: Annotated[list[str], Field(max_length=2)] = []
    mode: Literal["cancel", "keep"] = "keep"
    until: AwareDatetime = datetime.fromisoformat("2026-11-29T00:00:00+00:00")


def said(**members: Any) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        _Model.model_validate(members)
    return [problem_of(entry).message for entry in refused.value.errors()]


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"wait": "soon"}, "wait must be an integer (got soon)"),
        ({"wait": 61}, "wait must be at most 60 (got 61)"),
        ({"wait": -1}, "wait must be at least 0 (got -1)"),
        ({"wait": None}, "wait must be an integer (got null)"),
        ({"keep": "maybe"}, "keep must be true or false (got maybe)"),
        ({"name": 5}, "name must be a text (got 5)"),
        ({"name": ""}, "name must have at least 1 characters (got an empty text)"),
        ({"name": "abcde"}, "name must have at most 4 characters (got abcde)"),
        ({"name": "A"}, "name must match ^[a-z]*$ (got A)"),
        ({"tags": "x"}, "tags must be a list (got x)"),
        ({"tags": ["a", 1]}, "tags.1 must be a text (got 1)"),
        ({"tags": ["a"] * 3}, "tags must have at most 2 entries (got 3 entries)"),
        ({"mode": "stay"}, "mode must be one of cancel or keep (got stay)"),
        ({"other": 1}, "other is not supported"),
    ],
)
def test_sentence_names_place_rule_and_value(members: dict[str, Any], sentence: str) -> None:
    assert said(**members) == [sentence]


@pytest.mark.parametrize("value", ["tomorrow", "2026-13-01T00:00:00Z", {}, True, [1]])
def test_time_is_explained_by_an_example(value: object) -> None:
    (sentence,) = said(until=value)
    assert sentence.startswith("until must be a time such as 2026-12-31T00:00:00Z")


def test_time_without_an_offset_is_told_what_it_lacks() -> None:
    assert said(until=datetime.fromisoformat("2026-11-29T00:00:00"))[0].endswith(
        "with its offset from UTC (got a value of type datetime)"
    )


def test_no_error_of_pydantic_is_told_in_its_own_words() -> None:
    bounds = {"ge": 1, "gt": 1, "le": 1, "lt": 1, "min_length": 1, "max_length": 1}
    for known in get_args(ErrorType):
        entry = {
            "type": known,
            "loc": ("x",),
            "msg": "Input should be something else",
            "input": "5",
            "ctx": {**bounds, "expected": "'a'", "pattern": "a", "error": "is wrong"},
        }
        message = problem_of(entry).message
        assert message.startswith("x ")
        assert "Input should" not in message


def test_unknown_member_is_told_which_there_are() -> None:
    found = problem_of({"type": "extra_forbidden", "loc": ("events",), "input": 1}, known=["url", "name"])
    assert found.message == "events is not supported; there are url, name"


def test_missing_member_and_strange_name_are_named_safely() -> None:
    assert problem_of({"type": "missing", "loc": ("url",), "input": {}}).message == "url is required"
    found = problem_of({"type": "extra_forbidden", "loc": ("\ud800" * 99,), "input": 1})
    assert found.field.isascii()
    assert len(found.field) < 400
