"""Sorts the raw members of a submit into what the engine's contract reads and what the farm itself reads.

The farm's own members are checked here, all of them, each problem kept; members that nobody knows go on to
the contract, which refuses them by name. A value that may be spelt in several ways (object, JSON text,
brackets) ends up as one. No database, no network, no image is touched.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from api.body import InvalidJsonError, parse_json
from api.multipart import given_twice
from farm.jobs.video_object import MODEL_ID
from farm.webhooks.messages import DEFAULT_EVENT_TYPES, EVENT_TYPES
from farm.webhooks.signing import secret_bytes
from magi2.contract import Problem
from magi2.values import shown

EXTRA_PARAMS = ("seconds", "resolution", "output_width", "output_height", "deterministic")
PRIORITIES = {"low": -5, "normal": 0, "high": 5}
MIN_PRIORITY, MAX_PRIORITY = -10, 10
DEFAULT_EXPIRES_IN_S = 86_400
MIN_EXPIRES_IN_S, MAX_EXPIRES_IN_S = 60, 604_800
DEFAULT_MAX_ATTEMPTS = 3
MAX_ATTEMPTS = 5
MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_USER_CHARS = 128
MIN_RETENTION_S = 60
REUSE = ("off", "exact")
DAY_S = 86_400
MAX_GOT_CHARS = 40

_ASSET_NAMES = ("asset_id", "file_id")
# What the farm reads itself; the rest of a submit is the engine's contract.
FARM_FIELDS = frozenset(
    {"input_reference", "model", "extra_params", "profile", "priority", "expires_in", "execution_timeout_s"}
    | {"max_attempts", "retention_s", "metadata", "user", "webhook", "reuse"}
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class WebhookMember:
    """An endpoint for one job; `secret` is None where one must be drawn."""

    url: str
    event_types: tuple[str, ...]
    secret: str | None


@dataclass(frozen=True)
class Members:
    """A submit, sorted; `contract` still holds raw values, and names that nobody knows."""

    contract: dict[str, object]
    profile: str
    priority: int
    expires_in_s: int
    execution_timeout_s: int | None
    max_attempts: int
    retention_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    webhook: WebhookMember | None = None
    image_url: str | None = None
    asset_id: str | None = None
    asset_field: str = f"input_reference.{_ASSET_NAMES[0]}"  # where the request names the asset
    reuse: str = "off"


def read_members(
    raw: Mapping[str, Any], *, default_retention_s: int, max_retention_s: int
) -> tuple[Members, list[Problem]]:
    """Sort and check the members of a submit; the result is only good where no problem came with it."""
    reader = _Reader({name: value for name, value in raw.items() if value is not None})
    image_url, asset = _read_reference(reader)
    members = Members(
        profile=reader.text("profile", 64) or "auto",
        priority=_read_priority(reader),
        expires_in_s=reader.integer("expires_in", MIN_EXPIRES_IN_S, MAX_EXPIRES_IN_S, DEFAULT_EXPIRES_IN_S),
        execution_timeout_s=reader.optional_integer("execution_timeout_s", 1, 2**31 - 1),
        max_attempts=reader.integer("max_attempts", 1, MAX_ATTEMPTS, DEFAULT_MAX_ATTEMPTS),
        retention_s=reader.integer("retention_s", MIN_RETENTION_S, max_retention_s, default_retention_s),
        metadata=_read_metadata(reader),
        user=reader.text("user", MAX_USER_CHARS),
        webhook=_read_webhook(reader),
        image_url=image_url,
        asset_id=asset and asset[1],
        asset_field=f"input_reference.{asset[0] if asset else _ASSET_NAMES[0]}",
        reuse=_read_reuse(reader),
        contract=_read_contract(reader),
    )
    return members, reader.problems


class _Reader:
    """Takes members out one by one; what is left when all are read belongs to the contract."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.problems: list[Problem] = []

    def refuse(self, name: str, message: str, code: str = "invalid_field") -> None:
        self.problems.append(Problem(name, code, message))

    def text(self, name: str, max_chars: int) -> str | None:
        value = self.given.pop(name, None)
        if value is None or (isinstance(value, str) and _is_text(value, max_chars)):
            return value
        self.refuse(name, f"{name} must be a text of 1 to {max_chars} characters (got {_got(value)})")
        return None

    def optional_integer(self, name: str, lowest: int, highest: int) -> int | None:
        value = self.given.pop(name, None)
        number = _as_integer(value)
        if value is None or (number is not None and lowest <= number <= highest):
            return number
        self.refuse(name, f"{name} must be an integer from {lowest} to {highest} (got {shown(value)})")
        return None

    def integer(self, name: str, lowest: int, highest: int, default: int) -> int:
        number = self.optional_integer(name, lowest, highest)
        return default if number is None else number

    def object(self, name: str, example: str) -> dict[str, Any]:
        """Take an object in any of its spellings; a text must be JSON."""
        value = self.given.pop(name, None)
        if isinstance(value, str):
            try:
                value = parse_json(value)
            except InvalidJsonError as exc:
                self.refuse(name, f"{name}: {exc.message}")
                return {}
        if value is None or isinstance(value, dict):
            return value or {}
        self.refuse(name, f"{name} must be an object such as {example} (got {shown(value)})")
        return {}


def priority_of(value: object) -> int | None:
    """Return the number of a priority, given as a word or a number; None if it is neither."""
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    number = _as_integer(value)
    return number if number is not None and MIN_PRIORITY <= number <= MAX_PRIORITY else None


def bad_priority(given: object) -> Problem:
    """Make the problem of a priority that is neither."""
    words = ", ".join(PRIORITIES)
    text = f"priority must be one of {words}, or an integer from {MIN_PRIORITY} to {MAX_PRIORITY}"
    text += f" (got {shown(given)})"
    return Problem("priority", "invalid_field", text)


def read_metadata(value: object) -> tuple[dict[str, str], list[Problem]]:
    """Check metadata that stand alone."""
    reader = _Reader({"metadata": value})
    return _read_metadata(reader), reader.problems


def read_webhook(
    value: object, default_events: tuple[str, ...] = DEFAULT_EVENT_TYPES
) -> tuple[WebhookMember | None, list[Problem]]:
    """Check a webhook that stands alone."""
    reader = _Reader({} if value is None else {"webhook": value})
    return _read_webhook(reader, default_events), reader.problems


def _read_priority(reader: _Reader) -> int:
    given = reader.given.pop("priority", "normal")
    priority = priority_of(given)
    if priority is None:
        reader.problems.append(bad_priority(given))
    return priority or 0


def _read_metadata(reader: _Reader) -> dict[str, str]:
    pairs = reader.object("metadata", '{"project": "fox"}')
    if len(pairs) > MAX_METADATA_PAIRS:
        reader.refuse("metadata", f"metadata has {len(pairs)} pairs; at most {MAX_METADATA_PAIRS} are kept")
    for key, value in pairs.items():
        if not _is_text(key, MAX_METADATA_KEY):
            reader.refuse(
                "metadata",
                f"a key of metadata is a text of 1 to {MAX_METADATA_KEY} characters (got {_got(key)})",
            )
        elif not _is_text(value, MAX_METADATA_VALUE, min_chars=0):
            reader.refuse(
                f"metadata.{key}",
                f"a value of metadata is a text of up to {MAX_METADATA_VALUE} characters (got {_got(value)})",
            )
    return pairs


def _read_webhook(
    reader: _Reader, default_events: tuple[str, ...] = DEFAULT_EVENT_TYPES
) -> WebhookMember | None:
    value = reader.given.get("webhook")
    if value is None:
        return None
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        reader.given["webhook"] = {"url": value}
    given = reader.object("webhook", '{"url": "https://example.com/hook"}')
    for name in given.keys() - {"url", "events", "secret"}:
        reader.refuse(
            "webhook", f"webhook.{_shown(name)} is not supported; webhook takes url, events and secret"
        )
    url, events = given.get("url"), given.get("events")
    if not isinstance(url, str):
        got = "" if url is None else f" (got {shown(url)})"
        reader.refuse("webhook.url", f"webhook.url is required and must be a text{got}")
    return WebhookMember(
        url if isinstance(url, str) else "",
        tuple(_read_events(reader, events)) if events is not None else default_events,
        _read_secret(reader, given.get("secret")),
    )


def _read_events(reader: _Reader, events: object) -> list[str]:
    if not isinstance(events, list) or not events or any(event not in EVENT_TYPES for event in events):
        text = f"webhook.events must be a list of one or more of {', '.join(EVENT_TYPES)}"
        reader.refuse("webhook.events", f"{text} (got {_listed(events)})")
        return []
    return list(dict.fromkeys(events))


def _read_secret(reader: _Reader, secret: object) -> str | None:
    if secret is None:
        return None
    try:
        if not isinstance(secret, str):
            raise ValueError("webhook.secret must be a text")
        secret_bytes(secret)
    except ValueError as exc:
        reader.refuse("webhook.secret", str(exc))
        return None
    return secret


def _read_reuse(reader: _Reader) -> str:
    reuse = reader.given.pop("reuse", REUSE[0])
    if reuse in REUSE:
        return str(reuse)
    reader.refuse("reuse", f"reuse must be one of {', '.join(REUSE)} (got {shown(reuse)})")
    return REUSE[0]


def _read_reference(reader: _Reader) -> tuple[str | None, tuple[str, str] | None]:
    """Read the object form of the image: its bytes in a data: URL, or an asset (its member, its id)."""
    example = '{"image_url": "data:image/png;base64,..."}'
    is_given = reader.given.get("input_reference") is not None
    before = len(reader.problems)
    _refuse_address(reader, example)
    given = reader.object("input_reference", example)
    for name in given.keys() - {"image_url", *_ASSET_NAMES}:
        remedy = "send a file, image_url with a data: URL, or asset_id"
        reader.refuse(
            "input_reference",
            f"input_reference.{_shown(name)} is not supported; {remedy}",
            "field_unsupported",
        )
    url = given.get("image_url")
    assets = [(name, given[name]) for name in _ASSET_NAMES if given.get(name) is not None]
    if len(assets) + (url is not None) > 1:
        reader.refuse("input_reference", "input_reference names more than one image; give one", "image_count")
        return None, None
    if assets:
        name, asset_id = assets[0]
        if isinstance(asset_id, str):
            return None, (name, asset_id)
        text = f"{name} must be a text such as asset_01... (got {shown(asset_id)})"
        reader.refuse(f"input_reference.{name}", text)
        return None, None
    if url is None:
        if is_given and len(reader.problems) == before:  # else the clip would be rendered without the image
            remedy = f"input_reference names no image; leave it out, or send {example}"
            reader.refuse("input_reference", remedy)
        return None, None
    if isinstance(url, str) and url[:5].lower() == "data:":
        return url, None
    remedy = f"image_url must be a data: URL; addresses and paths are never opened (got {shown(url)})"
    reader.refuse("input_reference.image_url", remedy, "field_unsupported")
    return None, None


def _refuse_address(reader: _Reader, example: str) -> None:
    """Refuse a text that is no JSON object: what a URL or a path names is never opened."""
    value = reader.given.get("input_reference")
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        del reader.given["input_reference"]
        remedy = f"send a file, or {example}; addresses and paths are never opened"
        reader.refuse("input_reference", f"input_reference is an image: {remedy} (got {shown(value)})")


def _read_contract(reader: _Reader) -> dict[str, object]:
    """Take what the service fixes or refuses, then merge `extra_params` into what is left."""
    model = reader.given.pop("model", MODEL_ID)
    if model != MODEL_ID:
        text = f"model must be {MODEL_ID}; GET /v1/models lists what is served (got {shown(model)})"
        reader.refuse("model", text)
    extra = reader.object("extra_params", '{"resolution": "272p"}')
    contract = dict(reader.given)
    for name, value in extra.items():
        if name not in EXTRA_PARAMS:
            text = f"field extra_params.{_shown(name)} is not supported; it takes {', '.join(EXTRA_PARAMS)}"
            reader.refuse(f"extra_params.{_shown(name)}", text, "field_unsupported")
        elif name in contract:
            reader.problems.append(given_twice(name))
        elif value is not None:
            contract[name] = value
    if "seconds" in contract and "duration" in contract:
        reader.problems.append(given_twice("seconds"))
    return contract


def _as_integer(value: object) -> int | None:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_text(value: object, max_chars: int, min_chars: int = 1) -> bool:
    """Tell whether a value is a text that PostgreSQL can keep: no NUL, no lone surrogate."""
    if not isinstance(value, str) or not min_chars <= len(value) <= max_chars or "\0" in value:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _got(value: object) -> str:
    """Show a text by its length where that is what is wrong with it."""
    return (
        f"{len(value)} characters" if isinstance(value, str) and len(value) > MAX_GOT_CHARS else shown(value)
    )


def _listed(value: object) -> str:
    return ", ".join(map(shown, value[:10])) or "an empty list" if isinstance(value, list) else shown(value)


def _shown(name: str) -> str:
    """Return a client's own word in a form that is safe to send back."""
    return name[:64].encode("ascii", "backslashreplace").decode()
