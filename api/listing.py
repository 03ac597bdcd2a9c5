"""Reads the filters of `GET /v1/videos`; a parameter that nobody knows is refused, never ignored."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from starlette.datastructures import QueryParams

from api.problems import RefusedError
from farm.errors import NotFoundError
from farm.ids import is_id
from farm.jobs.queries import ListQuery
from farm.jobs.states import State, states_of
from magi2.contract import Problem
from magi2.values import shown

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
STATUSES = ("queued", "in_progress", "completed", "failed")
MAX_UNIX_S = 253_402_300_799  # the last second of the year 9999

_METADATA = re.compile(r"metadata\[(.+)\]", re.DOTALL)
_PLAIN = (
    "after",
    "limit",
    "order",
    "state",
    "status",
    "profile",
    "batch_id",
    "created_after",
    "created_before",
    "user",
)


def list_query_of(params: QueryParams, *, batch_id: str | None = None) -> ListQuery:
    """Build the query of a page; of one batch, in the order of its submit unless asked otherwise.

    Raises:
        RefusedError: Unknown parameters, values that are not allowed; all of them at once.
        NotFoundError: `after` cannot be a video of anybody.
    """
    reader = _Reader(params)
    query = ListQuery(
        after=reader.text("after"),
        limit=reader.integer("limit", 1, MAX_LIMIT) or DEFAULT_LIMIT,
        is_ascending=(reader.choice("order", ("asc", "desc")) or ("asc" if batch_id else "desc")) == "asc",
        states=_read_states(reader),
        profile=reader.text("profile"),
        batch_id=batch_id or reader.text("batch_id"),
        created_after=_read_time(reader, "created_after"),
        created_before=_read_time(reader, "created_before"),
        user_tag=reader.text("user"),
        metadata=_read_metadata(reader),
    )
    for name in dict.fromkeys(params):
        if name not in _PLAIN and not _METADATA.fullmatch(name):
            known = ", ".join((*_PLAIN, "metadata[key]"))
            reader.refuse(name, f"the parameter {name[:64]!a} is not supported; there are {known}")
    if reader.problems:
        raise RefusedError(reader.problems)
    if query.after is not None and not is_id(query.after, "video"):
        raise NotFoundError("the video that `after` names")
    return query


class _Reader:
    def __init__(self, params: QueryParams) -> None:
        self.params = params
        self.problems: list[Problem] = []

    def refuse(self, name: str, message: str) -> None:
        self.problems.append(Problem(name[:64], "invalid_field", message))

    def text(self, name: str) -> str | None:
        values = self.params.getlist(name)
        if len(values) > 1:
            self.refuse(name, f"{name} is given {len(values)} times; give it once")
        elif any("\0" in value for value in values):
            self.refuse(name, f"{name} holds a character that no value has")
        return values[0] if values else None

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if re.fullmatch(r"[0-9]{1,15}", text) and lowest <= int(text) <= highest:
            return int(text)
        self.refuse(name, f"{name} must be an integer from {lowest} to {highest} (got {shown(text)})")
        return None

    def choice(self, name: str, allowed: Iterable[str]) -> str | None:
        text = self.text(name)
        if text is not None and text not in allowed:
            self.refuse(name, f"{name} must be one of {', '.join(allowed)} (got {shown(text)})")
        return text


def _read_states(reader: _Reader) -> tuple[State, ...]:
    state = reader.choice("state", tuple(State))
    status = reader.choice("status", STATUSES)
    if reader.problems or (state is None and status is None):
        return ()
    wanted = set(State)
    if state is not None:
        wanted &= {State(state)}
    if status is not None:
        wanted &= states_of(status)
    if not wanted:
        reader.refuse("state", f"no video has the state {state} and the status {status}; give one of them")
    return tuple(sorted(wanted))


def _read_time(reader: _Reader, name: str) -> datetime | None:
    number = reader.integer(name, 0, MAX_UNIX_S)
    return None if number is None else datetime.fromtimestamp(number, UTC)


def _read_metadata(reader: _Reader) -> dict[str, str]:
    found = {}
    for name in dict.fromkeys(reader.params):
        match = _METADATA.fullmatch(name)
        value = reader.text(name) if match else None
        if match and value is not None:
            found[match[1]] = value
            if "\0" in match[1]:
                reader.refuse(name, "a key of metadata holds a character that no key has")
    return found
