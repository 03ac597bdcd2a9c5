"""The parts of /openapi.json that FastAPI cannot see, because these bodies and filters are read by hand.

Kept beside the readers by a test: every member and parameter named here is one that they know, and the other
way round.
"""

from typing import Any

from api.members import (
    EXTRA_PARAMS,
    MAX_ATTEMPTS,
    MAX_EXPIRES_IN_S,
    MAX_METADATA_PAIRS,
    MAX_USER_CHARS,
    MIN_EXPIRES_IN_S,
    MIN_RETENTION_S,
    REUSE,
)
from farm.jobs.video_object import MODEL_ID
from farm.webhooks.messages import EVENT_TYPES
from magi2.contract import (
    ACCELERATIONS,
    MAX_OUTPUT_SIDE,
    MAX_PROMPT_CHARS,
    MAX_SEED,
    MAX_STEPS,
    MIN_OUTPUT_SIDE,
)

_OUTPUT_SIDE = {"type": "integer", "minimum": MIN_OUTPUT_SIDE, "maximum": MAX_OUTPUT_SIDE, "multipleOf": 2}
_WEBHOOK = {
    "oneOf": [
        {"type": "string", "format": "uri"},
        {
            "type": "object",
            "required": ["url"],
            "additionalProperties": False,
            "properties": {
                "url": {"type": "string", "format": "uri"},
                "events": {"type": "array", "items": {"enum": list(EVENT_TYPES)}},
                "secret": {"type": "string", "description": "whsec_ and base64; drawn if absent."},
            },
        },
    ]
}
_DATA_URL = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "image_url": {"type": "string", "description": "data:image/png;base64,..."},
        "asset_id": {"type": "string", "description": "Of POST /v1/assets."},
        "file_id": {"type": "string", "description": "Another name of asset_id."},
    },
}
_MEMBERS: dict[str, Any] = {
    "prompt": {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_CHARS},
    "model": {"enum": [MODEL_ID]},
    "seconds": {"description": "10, as a number or text."},
    "duration": {"description": "Another name of seconds."},
    "size": {"enum": ["448x256", "896x512"]},
    "width": {"type": "integer"},
    "height": {"type": "integer"},
    "resolution": {"enum": ["272p", "540p"]},
    "num_frames": {"enum": [125]},
    "fps": {"enum": [12.5]},
    "num_inference_steps": {"type": "integer", "minimum": 1, "maximum": MAX_STEPS},
    "seed": {"type": "integer", "format": "int64", "minimum": 0, "maximum": MAX_SEED},
    "n": {"enum": [1]},
    "task": {"enum": ["text-to-video", "image-to-video"]},
    "output_width": _OUTPUT_SIDE,
    "output_height": _OUTPUT_SIDE,
    "deterministic": {"type": "boolean", "description": "Must be what the farm runs with."},
    "acceleration": {"enum": list(ACCELERATIONS)},
    "extra_params": {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {} for name in EXTRA_PARAMS},
    },
    "profile": {"type": "string", "default": "auto"},
    "priority": {"description": "low, normal, high, or an integer from -10 to 10."},
    "expires_in": {"type": "integer", "minimum": MIN_EXPIRES_IN_S, "maximum": MAX_EXPIRES_IN_S},
    "execution_timeout_s": {"type": "integer", "minimum": 1},
    "max_attempts": {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPTS},
    "retention_s": {"type": "integer", "minimum": MIN_RETENTION_S},
    "webhook": _WEBHOOK,
    "metadata": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "maxProperties": MAX_METADATA_PAIRS,
    },
    "user": {"type": "string", "maxLength": MAX_USER_CHARS},
    "reuse": {"enum": list(REUSE)},
}


def _body_schema(reference: dict[str, Any]) -> dict[str, Any]:
    members = {**_MEMBERS, "input_reference": reference}
    return {"type": "object", "required": ["prompt"], "properties": members, "additionalProperties": False}


SUBMIT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _body_schema(_DATA_URL)},
            "multipart/form-data": {
                "schema": _body_schema({"type": "string", "contentMediaType": "application/octet-stream"})
            },
        },
    }
}


BATCH_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["items"],
                    "additionalProperties": False,
                    "properties": {
                        "items": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": 100,
                            "items": {
                                "type": "object",
                                "properties": {
                                    **_MEMBERS,
                                    "input_reference": _DATA_URL,
                                    "seeds": {
                                        "type": "array",
                                        "minItems": 1,
                                        "items": {"type": "integer"},
                                        "description": "One video for each.",
                                    },
                                },
                                "additionalProperties": False,
                            },
                        },
                        "defaults": {"type": "object", "description": "Members of every item."},
                        "atomic": {"type": "boolean", "default": True},
                        "webhook": _WEBHOOK,
                        "metadata": _MEMBERS["metadata"],
                    },
                }
            }
        },
    }
}


def _parameter(name: str, schema: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
LIST_PARAMETERS: dict[str, Any] = {
    "parameters": [
        _parameter("after", _TEXT, "Last id of the page before."),
        _parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        _parameter("order", {"enum": ["asc", "desc"], "default": "desc"}),
        _parameter("state", _TEXT, "One of the eight states."),
        _parameter("status", {"enum": ["queued", "in_progress", "completed", "failed"]}),
        _parameter("profile", _TEXT),
        _parameter("batch_id", _TEXT),
        _parameter("created_after", _COUNT, "Unix seconds, exclusive."),
        _parameter("created_before", _COUNT, "Unix seconds, exclusive."),
        _parameter("user", _TEXT),
        _parameter("metadata[key]", _TEXT, "Any key of metadata; give several to match all."),
    ]
}
PAGE_PARAMETERS: dict[str, Any] = {"parameters": LIST_PARAMETERS["parameters"][:3]}
