"""Bodies: strict JSON, media types, and limits that hold before and while bytes arrive."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from api.body import Body, BodyRules, InvalidJsonError, parse_json, read_body
from farm.errors import FarmError
from magi2.contract import default_limits, validate

RULES = BodyRules(max_bytes=1000, timeout_s=60)
HASTY = replace(RULES, timeout_s=0.2)


def request(chunks: Iterable[bytes], pause_s: float = 0, **headers: str) -> Request:
    remaining = list(chunks)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(pause_s)
        body = remaining.pop(0) if remaining else b""
        return {"type": "http.request", "body": body, "more_body": bool(remaining)}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


async def read_json(text: bytes) -> Body:
    return await read_body(request([text], content_type="application/json"), RULES)


async def refusal(of: Request, rules: BodyRules = RULES) -> FarmError:
    with pytest.raises(FarmError) as caught:
        await read_body(of, rules)
    return caught.value


async def test_json_object_becomes_members() -> None:
    assert (await read_json(b'{"prompt": "a fox", "seed": 1}')).members == {"prompt": "a fox", "seed": 1}


async def test_json_in_pieces_is_put_together() -> None:
    halves = [b'{"prompt": "F\xc3', b'\xbcchse"}']
    body = await read_body(request(halves, content_type="application/json; charset=utf-8"), RULES)
    assert body.members == {"prompt": "Füchse"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 1}',
        b'{"a": {"b": 1, "b": 2}}',
        b'\xff\xfe{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": ' + b"[" * 100_000,
    ],
)
def test_text_that_is_no_strict_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidJsonError):
        parse_json(text)


def test_number_of_thousands_of_digits_is_left_to_the_rule_of_its_member() -> None:
    body = parse_json(b'{"seed": ' + b"9" * 5_000 + b', "n": 1}')
    (problem,) = validate({"prompt": "a fox", **body}, limits=default_limits()).problems
    assert (problem.field, problem.code) == ("seed", "seed_invalid")
    assert "(got 9999999999" in problem.message


@pytest.mark.parametrize("text", [b"[1]", b"null", b'"prompt"', b"5"])
async def test_json_that_is_no_object_is_refused(text: bytes) -> None:
    error = await refusal(request([text], content_type="application/json"))
    assert (error.http_status, error.code) == (400, "invalid_json")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_strict_reading_agrees_with_what_was_written(value: object) -> None:
    assert parse_json(json.dumps({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "application/json", "content_encoding": "gzip"},
    ],
)
async def test_other_media_types_and_encodings_are_refused(headers: dict[str, str]) -> None:
    error = await refusal(request([b"{}"], **headers))
    assert (error.http_status, error.code) == (415, "unsupported_media_type")


async def test_declared_length_over_the_limit_is_refused_before_reading() -> None:
    async def receive() -> dict[str, object]:
        raise AssertionError("nothing may be read")

    headers = [(b"content-type", b"application/json"), (b"content-length", b"1001")]
    scope = {"type": "http", "method": "POST", "headers": headers}
    error = await refusal(Request(scope, receive))
    assert (error.http_status, error.code) == (413, "payload_too_large")


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=XX"])
async def test_undeclared_length_is_counted_while_it_arrives(content_type: str) -> None:
    chunks = [bytes(400)] * 2 + [b"--XX\r\n" + bytes(400)] * 100
    big = request(chunks, content_type=content_type)
    if content_type != "application/json":
        head = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
        big = request([head, *chunks], content_type=content_type)
    error = await refusal(big)
    assert (error.http_status, error.code) == (413, "payload_too_large")


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=XX"])
async def test_slow_body_is_given_up(content_type: str) -> None:
    head = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    error = await refusal(request([head] + [b"-"] * 100, pause_s=0.02, content_type=content_type), HASTY)
    assert (error.http_status, error.code) == (408, "request_timeout")


def test_product_rules_take_an_image_of_20_mib_in_either_form() -> None:
    rules = BodyRules()
    assert rules.max_bytes > 4 * -(-20 * 1024 * 1024 // 3) + 1024 * 1024
    assert rules.timeout_s == 60
