"""Says in the farm's own words what pydantic found wrong with a parameter or a member.

Every sentence names the place, the rule and the value that came. Which rules there are is said by the models;
a rule that is not listed here is still told, in general words, and never in the library's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from magi2.contract import Problem
from magi2.values import shown

_INTEGER, _NUMBER, _BOOLEAN, _TEXT = "an integer", "a number", "true or false", "a text"
_TIME = "a time such as 2026-12-31T00:00:00Z or in Unix seconds"
_MUST_BE = {
    "int_type": _INTEGER,
    "int_parsing": _INTEGER,
    "int_parsing_size": _INTEGER,
    "int_from_float": _INTEGER,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "string_type": _TEXT,
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "datetime_type": _TIME,
    "datetime_parsing": _TIME,
    "datetime_from_date_parsing": _TIME,
    "datetime_object_invalid": _TIME,
    "timezone_aware": f"{_TIME}, with its offset from UTC",
}
_RULES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "greater_than": lambda context: f"must be more than {context['gt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "less_than": lambda context: f"must be less than {context['lt']}",
    "string_too_short": lambda context: f"must have at least {context['min_length']} characters",
    "string_too_long": lambda context: f"must have at most {context['max_length']} characters",
    "too_short": lambda context: f"must have at least {context['min_length']} entries",
    "too_long": lambda context: f"must have at most {context['max_length']} entries",
    "literal_error": lambda context: f"must be one of {str(context['expected']).replace(chr(39), '')}",
    "string_pattern_mismatch": lambda context: f"must match {context['pattern']}",
    "value_error": lambda context: str(context.get("error", "is not allowed")),
}


def problem_of(
    entry: Mapping[str, Any], *, place: Sequence[object] | None = None, known: Collection[str] = ()
) -> Problem:
    """Return one error of pydantic's as a problem.

    Args:
        entry: An item of `ValidationError.errors()`.
        place: Where it is, if the entry's own `loc` says more than a client wants to know.
        known: The members there are, to be named where an unknown one is refused.
    """
    name = _name(entry["loc"] if place is None else place)
    kind = entry["type"]
    if kind == "missing":
        return Problem(name, "invalid_field", f"{name} is required")
    if kind == "extra_forbidden":
        there_are = f"; there are {', '.join(known)}" if known and len(entry["loc"]) == 1 else ""
        return Problem(name, "invalid_field", f"{name} is not supported{there_are}")
    context = entry.get("ctx") or {}
    rule = f"must be {_MUST_BE[kind]}" if kind in _MUST_BE else _RULES.get(kind, _general)(context)
    return Problem(name, "invalid_field", f"{name} {rule} (got {given(entry.get('input'))})")


def _general(_context: Mapping[str, Any]) -> str:
    return "has a value that is not allowed"


def given(value: object) -> str:
    """Say which value came: a text as it is, a list or an object by its size."""
    if value is None:
        return "null"
    return f"{len(value)} entries" if isinstance(value, list | dict) else shown(value)


def _name(place: Sequence[object]) -> str:
    text = ".".join(str(part) for part in place) or "body"
    return text[:64].encode("ascii", "backslashreplace").decode()
