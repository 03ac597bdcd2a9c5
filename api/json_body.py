"""Reads a small JSON body into a pydantic model; no body at all means no members.

Strict as submits are: one object, no member twice, unknown members refused, every problem at once.
"""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from api.body import BodyRules, read_body
from api.deps import Services
from api.plain_words import problem_of
from api.problems import RefusedError
from farm.errors import FarmError

MAX_BODY_BYTES = 64 * 1024
Model = TypeVar("Model", bound=BaseModel)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that is read by hand, for /openapi.json."""
    return {"requestBody": {"content": {"application/json": {"schema": model.model_json_schema()}}}}


async def read_model(request: Request, services: Services, model: type[Model]) -> Model:
    """Read a body.

    Raises:
        RefusedError: Members that are missing, unknown or not allowed; all of them at once.
        FarmError: 400, 408, 413 or 415.
    """
    members: dict[str, Any] = {}
    headers = request.headers
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            message = f"send application/json (got {media_type[:100] or 'no Content-Type'})"
            raise FarmError("unsupported_media_type", 415, message)
        rules = BodyRules(max_bytes=MAX_BODY_BYTES, timeout_s=services.body_rules.timeout_s)
        members = (await read_body(request, rules)).members
    return parse_model(model, members)


def parse_model(model: type[Model], members: dict[str, Any]) -> Model:
    """Check members against a model.

    Raises:
        RefusedError: All problems at once.
    """
    try:
        return model.model_validate(members)
    except ValidationError as exc:
        raise RefusedError([problem_of(entry) for entry in exc.errors(include_url=False)]) from None
