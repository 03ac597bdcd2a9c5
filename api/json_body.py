"""Reads a small JSON body into a pydantic model; no body at all means no members.

Strict as submits are: one object, no member twice, unknown members refused, every problem at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from api.body import BodyRules, read_body
from api.deps import Services
from api.plain_words import problem_of
from api.problems import RefusedError
from farm.errors import FarmError
from magi2.contract import Problem

MAX_BODY_BYTES = 64 * 1024
Model = TypeVar("Model", bound=BaseModel)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that is read by hand, for /openapi.json."""
    return {"requestBody": {"content": {"application/json": {"schema": model.model_json_schema()}}}}


async def read_model(
    request: Request,
    services: Services,
    model: type[Model],
    *,
    check: Callable[[Mapping[str, Any]], Sequence[Problem]] = lambda _: (),
) -> Model:
    """Read a body.

    `check` finds in the raw members what the model does not know of; its problems are told with the others.

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
    return parse_model(model, members, check(members))


def parse_model(model: type[Model], members: dict[str, Any], more: Sequence[Problem] = ()) -> Model:
    """Check members against a model; `more` is what else was found in them.

    Raises:
        RefusedError: All problems at once.
    """
    try:
        found = model.model_validate(members)
    except ValidationError as exc:
        entries = exc.errors(include_url=False)
        problems = [problem_of(entry, known=model.model_fields) for entry in entries]
        raise RefusedError([*problems, *more]) from None
    if more:
        raise RefusedError(more)
    return found
