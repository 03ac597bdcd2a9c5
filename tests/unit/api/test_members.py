"""The members of a submit that are the farm's own, in every spelling."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.members import Members, read_members
from farm.webhooks.messages import DEFAULT_EVENT_TYPES
from farm.webhooks.signing import new_secret
from magi2.contract import REQUEST_FIELDS, Problem

DAY_S = 86_400
SECRET = new_secret()


def read(**raw: Any) -> tuple[Members, list[Problem]]:
    return read_members(raw, default_retention_s=7 * DAY_S, max_retention_s=90 * DAY_S)


def accepted(**raw: Any) -> Members:
    members, problems = read(**raw)
    assert problems == []
    return members


def refused(**raw: Any) -> Problem:
    (problem,) = read(**raw)[1]
    return problem


def test_defaults_are_those_of_the_specification() -> None:
    assert accepted(prompt="a fox") == Members(
        contract={"prompt": "a fox"},
        profile="auto",
        priority=0,
        expires_in_s=86_400,
        execution_timeout_s=None,
        max_attempts=3,
        retention_s=7 * DAY_S,
    )


def test_null_counts_as_not_given() -> None:
    assert accepted(prompt="a fox", priority=None, extra_params=None, webhook=None) == accepted(
        prompt="a fox"
    )


@pytest.mark.parametrize(
    ("given_value", "meant"),
    [("low", -5), ("normal", 0), ("high", 5), (-10, -10), (10, 10), ("7", 7), ("-3", -3)],
)
def test_priority_is_a_word_or_a_number(given_value: object, meant: int) -> None:
    assert accepted(priority=given_value).priority == meant


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("priority", [-10, 10], ["urgent", 11, -11, 1.5, True, "1.0", [], {}]),
        ("expires_in", [60, 604_800, "3600"], [59, 604_801, 60.0, "1h", True, []]),
        ("execution_timeout_s", [1, "900"], [0, -1, "x", 2**31, True]),
        ("max_attempts", [1, 5, "2"], [0, 6, "", True]),
        ("retention_s", [60, 90 * DAY_S], [59, 90 * DAY_S + 1, "7d"]),
        ("user", ["u", "x" * 128], ["", "x" * 129, 5, "a\0b", "\ud800"]),
        ("profile", ["auto", "sp4"], ["", "x" * 65, 7, {}]),
        ("metadata", [{}, {"a": ""}, '{"a": "b"}'], [[], "x", 5, {"a": 1}, {"": "x"}, {"a": "x" * 513}]),
        ("model", ["magi-2-preview"], ["sora-2", 5]),
        ("reuse", ["off", "exact"], ["on", True]),
        ("extra_params", [{}, "{}"], ["", "[]", "{", 5, {"image_path": "/etc/passwd"}, '{"seed": 1}']),
    ],
)
def test_each_member_takes_what_is_allowed_and_nothing_else(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    assert [value for value in good if read(**{name: value})[1]] == []
    assert [value for value in bad if not read(**{name: value})[1]] == []


def test_metadata_keeps_sixteen_pairs() -> None:
    assert len(accepted(metadata={str(number): "x" for number in range(16)}).metadata) == 16
    assert refused(metadata={str(number): "x" for number in range(17)}).field == "metadata"


@pytest.mark.req("F-14")
@pytest.mark.parametrize(
    "spelling", [{"resolution": "272p"}, '{"resolution": "272p"}', ' { "resolution":"272p" } ']
)
def test_extra_params_may_be_an_object_or_json_text(spelling: object) -> None:
    assert accepted(extra_params=spelling).contract == {"resolution": "272p"}


@pytest.mark.req("F-14")
def test_field_given_at_the_top_and_in_extra_params_is_a_problem() -> None:
    assert refused(seconds=10, extra_params={"seconds": 10}).field == "seconds"
    assert refused(seconds=10, duration=10).field == "seconds"
    assert refused(duration=10, extra_params={"seconds": 10}).field == "seconds"


@pytest.mark.req("F-13")
@pytest.mark.parametrize(
    "name", ["image_path", "input_path", "checkpoint", "image_url", "guidance_scale", "seed"]
)
def test_extra_params_have_an_allow_list(name: str) -> None:
    problem = refused(extra_params={name: "/etc/passwd"})
    assert (problem.field, problem.code) == (f"extra_params.{name}", "field_unsupported")


@pytest.mark.req("F-13")
@pytest.mark.parametrize(
    "value",
    [
        {"image_url": "https://example.com/a.png"},
        {"image_url": "http://169.254.169.254/"},
        {"image_url": "file:///etc/passwd"},
        {"image_url": "/etc/passwd"},
        {"image_url": "s3://farm/key"},
        {"image_url": 5},
        {"asset_id": 1},
        {"asset_id": "asset_1", "file_id": "asset_1"},
        {"asset_id": "asset_1", "image_url": "data:image/png;base64,AA=="},
        {"path": "/etc/passwd"},
        "/etc/passwd",
        "https://example.com/a.png",
        ["data:image/png;base64,AA=="],
    ],
)
def test_reference_is_never_something_to_open(value: object) -> None:
    members, problems = read(input_reference=value)
    assert members.image_url is None
    assert problems


@pytest.mark.parametrize("value", [{}, "{}", {"image_url": None}, {"asset_id": None}])
def test_reference_that_names_no_image_is_refused(value: object) -> None:
    problem = refused(input_reference=value)
    assert (problem.field, problem.code) == ("input_reference", "invalid_field")
    assert "names no image" in problem.message


@pytest.mark.parametrize("wrap", [lambda value: value, json.dumps])
def test_reference_may_be_a_data_url(wrap: Any) -> None:
    url = "data:image/png;base64,AA=="
    assert accepted(input_reference=wrap({"image_url": url})).image_url == url


@pytest.mark.parametrize(
    "spelling",
    [
        "https://example.com/hook",
        {"url": "https://example.com/hook"},
        '{"url": "https://example.com/hook"}',
    ],
)
def test_webhook_may_be_a_text_an_object_or_json_text(spelling: object) -> None:
    webhook = accepted(webhook=spelling).webhook
    assert webhook is not None
    assert (webhook.url, webhook.event_types, webhook.secret) == (
        "https://example.com/hook",
        DEFAULT_EVENT_TYPES,
        None,
    )


def test_webhook_keeps_its_events_and_secret() -> None:
    events = ["video.queued", "video.completed", "video.queued"]
    webhook = accepted(webhook={"url": "https://a.example/", "events": events, "secret": SECRET}).webhook
    assert webhook is not None
    assert (webhook.event_types, webhook.secret) == (("video.queued", "video.completed"), SECRET)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "webhook.url"),
        ({"url": 5}, "webhook.url"),
        ({"url": "https://a.example/", "events": []}, "webhook.events"),
        ({"url": "https://a.example/", "events": "video.completed"}, "webhook.events"),
        ({"url": "https://a.example/", "events": [{}]}, "webhook.events"),
        ({"url": "https://a.example/", "events": ["video.eaten"]}, "webhook.events"),
        ({"url": "https://a.example/", "secret": "short"}, "webhook.secret"),
        ({"url": "https://a.example/", "secret": ["whsec_"]}, "webhook.secret"),
        ({"url": "https://a.example/", "headers": {}}, "webhook"),
    ],
)
def test_broken_webhook_is_named_by_its_member(value: object, field: str) -> None:
    assert refused(webhook=value).field == field


def test_secret_is_never_repeated_in_a_problem() -> None:
    assert "hunter2" not in refused(webhook={"url": "https://a.example/", "secret": "whsec_hunter2"}).message


def test_all_problems_come_at_once() -> None:
    problems = read(priority="x", expires_in=1, max_attempts=9, user="", metadata=5, extra_params="{")[1]
    assert {problem.field for problem in problems} == {
        "priority",
        "expires_in",
        "max_attempts",
        "user",
        "metadata",
        "extra_params",
    }


def test_fields_of_the_contract_pass_through_untouched() -> None:
    raw = {name: object() for name in REQUEST_FIELDS - {"seconds"}}
    assert accepted(**raw).contract == raw


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FARM_NAMES = ("priority", "user", "expires_in", "retention_s", "max_attempts", "profile", "model", "reuse")
OBJECT_NAMES = ("webhook", "metadata", "extra_params", "input_reference", "prompt", "seconds", "style")
NAMES = st.sampled_from((*FARM_NAMES, *OBJECT_NAMES))


@given(st.dictionaries(NAMES | st.text(max_size=10), JSON))
def test_any_json_is_sorted_without_an_error(raw: dict[str, Any]) -> None:
    members, problems = read_members(raw, default_retention_s=DAY_S, max_retention_s=DAY_S)
    assert isinstance(members.contract, dict)
    for problem in problems:
        problem.message.encode()
        problem.field.encode()


@pytest.mark.parametrize(
    "value", ["https://example.com/a.png", "/etc/passwd", "first.png", "data:image/png;base64,AAAA", ""]
)
@pytest.mark.req("F-13")
def test_reference_that_is_a_text_is_told_how_an_image_is_given(value: str) -> None:
    problem = refused(prompt="a fox", input_reference=value)
    assert problem.field == "input_reference"
    assert "send a file" in problem.message
    assert "JSON" not in problem.message


@pytest.mark.parametrize(
    ("member", "value", "got"),
    [
        ("priority", 11, "11"),
        ("priority", "urgent", "urgent"),
        ("expires_in", 5, "5"),
        ("max_attempts", "many", "many"),
        ("user", 7, "7"),
        ("user", "u" * 129, "129 characters"),
        ("metadata", [1], "a value of type list"),
        ("metadata", {"a": 5}, "5"),
        ("reuse", "always", "always"),
        ("model", "sora", "sora"),
        ("webhook", {"url": "https://a.example", "events": ["video.begun"]}, "video.begun"),
    ],
)
def test_refusal_says_what_was_given(member: str, value: object, got: str) -> None:
    assert refused(prompt="a fox", **{member: value}).message.endswith(f"(got {got})")
