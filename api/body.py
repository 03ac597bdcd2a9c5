"""Reads the body of a submit: JSON or multipart, counted and timed while it arrives.

A body over the limit is refused from its Content-Length, or at the first byte too many; a slow one after a
minute. JSON is read strictly: UTF-8, one object, no member twice, no NaN. The result is raw members, uploads
and the problems that the spelling itself has; what members mean is `api/members.py`'s business.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from fastapi import Request

from api.multipart import PayloadTooLargeError, Upload, nest, read_form
from farm.errors import FarmError
from magi2.contract import Problem

MIB = 1024 * 1024
SPOOL_BYTES = MIB
# Parsing less than this takes under a millisecond; more is done in a thread.
INLINE_JSON_BYTES = 64 * 1024
# Python itself reads no more, since the time grows with the square.
MAX_DIGITS = 4300


@dataclass(frozen=True)
class BodyRules:
    """How much, and how long: 20 MiB of image as base64 and 2 MiB of everything else, within a minute."""

    max_bytes: int = 20 * MIB * 4 // 3 + 2 * MIB
    timeout_s: float = 60.0


class InvalidJsonError(FarmError):
    """The text is not the JSON that it must be."""

    def __init__(self, message: str) -> None:
        """Take the sentence for the user."""
        super().__init__("invalid_json", 400, message)


@dataclass
class Body:
    """A request as it was spelt; `close` removes spooled files."""

    members: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)

    def close(self) -> None:
        """Remove the spooled files."""
        for upload in self.uploads:
            upload.file.close()


async def read_body(request: Request, rules: BodyRules) -> Body:
    """Read a submit's body; the caller closes it.

    Raises:
        FarmError: 400, 408, 413 or 415, each with its reason.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    _check_headers(request, media_type, rules)
    try:
        async with asyncio.timeout(rules.timeout_s):
            chunks = _counted(request, rules.max_bytes)
            if media_type == "application/json":
                return await _read_json(chunks)
            form = await read_form(chunks, content_type)
    except TimeoutError as exc:
        message = f"the body did not arrive within {rules.timeout_s:g} seconds"
        raise FarmError("request_timeout", 408, message) from exc
    members, problems = nest(form.fields)
    return Body(members, problems, form.uploads)


def parse_json(text: str | bytes) -> Any:
    """Read JSON strictly.

    Raises:
        InvalidJsonError: Malformed, not UTF-8, a member twice, NaN or infinity, too deep.
    """
    try:
        whole = text.decode() if isinstance(text, bytes) else text
        return json.loads(
            whole, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer
        )
    except RecursionError as exc:
        raise InvalidJsonError("the JSON is nested too deeply") from exc
    except UnicodeDecodeError as exc:
        raise InvalidJsonError("the JSON is not valid UTF-8") from exc
    except ValueError as exc:
        where = f" (line {exc.lineno}, column {exc.colno})" if isinstance(exc, json.JSONDecodeError) else ""
        raise InvalidJsonError(f"the JSON is not well-formed{where}") from exc


def _check_headers(request: Request, media_type: str, rules: BodyRules) -> None:
    if media_type not in {"application/json", "multipart/form-data"}:
        message = (
            f"send application/json or multipart/form-data (got {media_type[:100] or 'no Content-Type'})"
        )
        raise FarmError("unsupported_media_type", 415, message)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise FarmError("unsupported_media_type", 415, "a compressed body is not accepted; send it plain")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > rules.max_bytes:
        raise PayloadTooLargeError("the body", rules.max_bytes)


async def _counted(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise PayloadTooLargeError("the body", max_bytes)
        yield chunk


async def _read_json(chunks: AsyncIterator[bytes]) -> Body:
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as spool:
        num_bytes = 0
        async for chunk in chunks:
            num_bytes += len(chunk)
            spool.write(chunk)
        spool.seek(0)
        raw = spool.read()
    value = parse_json(raw) if num_bytes <= INLINE_JSON_BYTES else await asyncio.to_thread(parse_json, raw)
    if not isinstance(value, dict):
        raise InvalidJsonError("the body must be one JSON object")
    return Body(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise InvalidJsonError("a member of a JSON object is given twice; give it once")
    return members


def _integer(digits: str) -> int | Decimal:
    """Read any number of digits; one that is too long for any member stays a value that rules can refuse."""
    return int(digits) if len(digits) <= MAX_DIGITS else Decimal(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJsonError(f"the JSON holds {name}, which is no number")
