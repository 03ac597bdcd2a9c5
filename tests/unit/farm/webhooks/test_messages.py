"""Bodies of webhook messages: thin, ordered by seq, small."""

import json

import jsonschema

from farm.jobs.job import Event
from farm.jobs.states import State
from farm.webhooks.messages import DEFAULT_EVENT_TYPES, EVENT_TYPES, MAX_BODY_BYTES, message_body
from tests.job_rows import AT, running_job

SCHEMA = {
    "type": "object",
    "required": ["id", "object", "type", "created_at", "timestamp", "data"],
    "additionalProperties": False,
    "properties": {
        "id": {"pattern": "^evt_[^.]+$"},
        "object": {"const": "event"},
        "type": {"enum": list(EVENT_TYPES)},
        "created_at": {"type": "integer"},
        "timestamp": {"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$"},
        "data": {
            "type": "object",
            "required": ["id", "object", "state", "status", "seq", "error", "metadata"],
            "properties": {"object": {"const": "video"}, "seq": {"type": "integer"}},
        },
    },
}


def body(**changes):
    job = running_job(state=State.SUCCEEDED, **changes)
    return message_body("evt_1", "video.completed", job, Event(job.id, 5, "succeeded", AT, 1))


def test_a_body_keeps_its_schema():
    jsonschema.validate(body(), SCHEMA)


def test_the_thin_body_holds_no_prompt():
    assert "prompt" not in json.dumps(body())


def test_receivers_can_order_by_seq_and_read_the_openai_status():
    data = body(metadata={"order": "7"})["data"]
    assert (data["seq"], data["state"], data["status"], data["metadata"]) == (
        5,
        "succeeded",
        "completed",
        {"order": "7"},
    )


def test_metadata_that_makes_the_body_too_large_is_left_out_and_said_to_be():
    metadata = {f"{number:064}": "\N{SNOWMAN}" * 512 for number in range(16)}
    large = body(metadata=metadata)
    assert len(json.dumps(large, ensure_ascii=False).encode()) < MAX_BODY_BYTES
    assert large["data"]["metadata"] == {}
    assert large["data"]["is_metadata_omitted"]


def test_the_default_subscription_is_the_four_endings():
    assert DEFAULT_EVENT_TYPES == ("video.completed", "video.failed", "video.canceled", "video.expired")
