"""The prompt in a request: what is missing, invalid, too deep or too long, each with its own cause."""

import json
from collections import OrderedDict
from typing import Any

import pytest

from magi2.contract import (
    MAX_PROMPT_CHARS,
    GenerationRequest,
    Problem,
    invalid_prompt,
    problems_of,
    too_many_tokens,
)
from magi2.values import shown
from tests.contract_requests import IMAGE, LIMITS, accepted, problems


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize("prompt", [None, "", "  ", "\n\t", "\u00a0\u2003"])
def test_prompt_is_required(prompt: object) -> None:
    want = Problem("prompt", "prompt_missing", "prompt is required and must not be blank")
    assert problems(prompt=prompt) == [want]


@pytest.mark.parametrize("prompt", [5, True, ["a"], b"text", 1.5])
def test_prompt_that_is_no_text_is_told_so(prompt: object) -> None:
    text = f"prompt must be a text or a caption object (got {shown(prompt)})"
    assert problems(prompt=prompt) == [Problem("prompt", "prompt_missing", text)]


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        (nested(65), "nested too deeply; at most 64"),
        (json.dumps(nested(65)), "nested too deeply; at most 64"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "nested too deeply; at most 64"),
        ("[" * 50_000, "nested too deeply; at most 64"),
        (nested(3_000), "nested too deeply; at most 64"),
        ("lone \ud800 surrogate", "half of a surrogate pair (U+D800 to U+DFFF); remove it"),
        ("\udfff", "half of a surrogate pair"),
        ({"a": "\ud800"}, "half of a surrogate pair"),
        ('{"global_layer": {"context": "\\ud800"}}', "half of a surrogate pair"),
        ("nul \0 character", "NUL (U+0000); remove it"),
        ({"a": object()}, "a value that JSON cannot spell"),
        ({"n": 10**5000}, "a value that JSON cannot spell"),
    ],
    ids=range(12),
)
def test_prompt_of_invalid_characters_or_depth_is_refused_with_its_own_cause(
    prompt: object, cause: str
) -> None:
    (found,) = problems(prompt=prompt)
    assert (found.field, found.code) == ("prompt", "prompt_invalid") == ("prompt", invalid_prompt().code)
    assert cause in found.message


def test_caption_that_holds_itself_is_refused() -> None:
    caption: dict[str, Any] = {"global_layer": {"context": "c"}}
    caption["self"] = caption
    assert [p.code for p in problems(prompt=caption)] == ["prompt_invalid"]


def test_surrogate_that_only_the_image_marker_would_unescape_is_refused_with_an_image() -> None:
    prompt = '{"scene": "\\ud800"}'
    assert problems(prompt=prompt) == []
    assert [p.code for p in problems((IMAGE,), prompt=prompt)] == ["prompt_invalid"]
    stored = GenerationRequest(prompt, "272p", 4, 1, has_image=True)
    assert [p.code for p in problems_of(stored, LIMITS)] == ["prompt_invalid"]


@pytest.mark.parametrize(
    "prompt", [nested(64), json.dumps(nested(64)), "\U0001f600", '{"a": "\\ud83d\\ude00"}']
)
def test_prompt_at_the_limits_is_accepted(prompt: object) -> None:
    assert problems(prompt=prompt) == []
    assert problems((IMAGE,), prompt=prompt) == []


EMPTY_CAPTION = {"global_layer": "a caption in the wrong place"}


@pytest.mark.parametrize("prompt", [EMPTY_CAPTION, json.dumps(EMPTY_CAPTION)])
def test_caption_that_renders_to_nothing_is_refused_also_with_an_image(prompt: object) -> None:
    text = "the JSON prompt contains no usable caption text; put the caption under global_layer"
    want = [Problem("prompt", "prompt_empty_after_normalisation", text)]
    assert problems(prompt=prompt) == want
    assert problems((IMAGE,), prompt=prompt) == want


def test_prompt_may_be_an_object_which_is_stored_as_json_text() -> None:
    caption = OrderedDict(global_layer={"context": "a \u6e56", "n": 1.5})
    assert accepted(prompt=caption).prompt == '{"global_layer": {"context": "a \u6e56", "n": 1.5}}'


def test_prompt_of_too_many_characters_is_refused_with_its_length() -> None:
    assert problems(prompt="x" * MAX_PROMPT_CHARS) == []
    text = "prompt is 60001 characters; at most 60000 are supported"
    assert problems(prompt="x" * 60_001) == [Problem("prompt", "prompt_too_long", text)]


@pytest.mark.parametrize(
    "caption",
    [{"a": [0] * 60_000}, {"a": "x" * 60_000}, {"global_layer": {str(k): k for k in range(40_000)}}],
)
def test_object_of_too_many_characters_is_refused(caption: object) -> None:
    assert [p.code for p in problems(prompt=caption)] == ["prompt_too_long"]


def test_prompt_of_too_many_tokens_is_named_with_its_count() -> None:
    text = "prompt is 7014 tokens; at most 7000 are supported"
    assert too_many_tokens(7014) == Problem("prompt", "prompt_too_long", text)
