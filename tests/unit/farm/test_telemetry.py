"""Logs are JSON lines, and what must not be in them is not."""

import io
import json
import logging
import sys

import pytest
import structlog

from farm.accounts import make_key
from farm.settings import Settings
from farm.telemetry import clean_text, configure_logging

KEY = make_key("live").text


@pytest.fixture
def lines(monkeypatch):
    """Configure JSON logs and return a function that reads what was written."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    saved = logging.getLogger().handlers, logging.getLogger().level
    shape = structlog.get_config()
    settings = Settings(database_url="postgresql://x/y", redis_url="redis://x")
    configure_logging(settings, service="test")

    def read():
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield read
    structlog.configure(**shape)
    structlog.contextvars.clear_contextvars()
    logging.getLogger().handlers, logging.getLogger().level = saved


def test_a_line_has_the_documented_members_and_what_is_bound(lines):
    with structlog.contextvars.bound_contextvars(job_id="video_1", epoch=2, group="g"):
        structlog.get_logger().info("job_claimed", profile="tiny-cpu")
    (line,) = lines()
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "msg": "job_claimed",
        "service": "test",
        "job_id": "video_1",
        "epoch": 2,
        "group": "g",
        "profile": "tiny-cpu",
    }


def test_lines_of_libraries_take_the_same_form(lines):
    logging.getLogger("uvicorn.error").warning("listening on %s", 8000)
    (line,) = lines()
    assert (line["msg"], line["level"], line["service"]) == ("listening on 8000", "warning", "test")


def test_debug_lines_are_left_out_by_default(lines):
    structlog.get_logger().debug("details")
    assert lines() == []


@pytest.mark.parametrize(
    "member",
    [
        {"prompt": "a private wish"},
        {"key": f"with {KEY} in it"},
        {"signing_secret": "private wish"},
        {"Authorization": "private wish"},
        {"url": "https://store/o.mp4?X-Amz-Signature=private"},
        {"database": "postgresql://farm:private@db/farm"},
        {"nested": {"deep": [{"api_key": "private"}, "Bearer private"]}},
        {"hook": "whsec_cHJpdmF0ZXByaXZhdGU="},
        {"hook": "whsk_cHJpdmF0ZXByaXZhdGU="},
        {"found": ("https://hooks.example/in?token=private",)},
    ],
)
def test_private_values_never_appear(lines, member):
    structlog.get_logger().warning("event", **member)
    text = json.dumps(lines())
    assert "redacted" in text
    for private in ("private", "cHJpdmF0ZX", KEY[18:]):
        assert private not in text


def test_a_traceback_is_cleaned_too(lines):
    said = f"refused\nDETAIL:  Failing row contains (video_1, a wish, {KEY})\nrest"
    try:
        raise RuntimeError(said)
    except RuntimeError:
        structlog.get_logger().exception("broken")
    (line,) = lines()
    assert "Traceback" in line["exception"]
    assert "a wish" not in line["exception"]
    assert "rest" in line["exception"]


def test_a_newline_in_a_value_does_not_start_a_line(lines):
    structlog.get_logger().info("event", name='x"}\n{"level":"forged"')
    assert len(lines()) == 1


def test_objects_that_are_not_json_are_shown_cleaned(lines):
    class Odd:
        def __repr__(self):
            return f"<Odd {KEY}>"

    structlog.get_logger().info("event", odd=Odd())
    (line,) = lines()
    assert line["odd"].startswith("<Odd mk_live_")
    assert KEY not in line["odd"]


def test_harmless_text_is_left_alone():
    text = "took 3.5 s at https://farm.example/v1/videos and mk_nothing"
    assert clean_text(text) == text
