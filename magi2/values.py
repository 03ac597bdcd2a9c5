"""Strict reading of the values of a request, which arrive as Python or JSON values or as form strings.

Each reader returns the value, or None when the text or type does not say it plainly: nothing is rounded,
trimmed or guessed. Only ASCII digits count, a bool is no number, a float is no integer. `shown` prints any
value for a message: short, printable and encodable. Standard library only.
"""

import math
import re
from decimal import Decimal
from fractions import Fraction

Number = int | float | Decimal | Fraction

_INTEGER = re.compile(r"[+-]?[0-9]{1,64}", re.ASCII)
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]{1,64}(?:\.[0-9]{0,64})?|\.[0-9]{1,64})(?:[eE][+-]?[0-9]{1,3})?", re.ASCII
)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MAX_SHOWN = 40


def as_integer(value: object) -> int | None:
    """Read an int or a string of at most 64 ASCII digits with an optional sign."""
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> Number | None:
    """Read a finite number exactly; strings may have a fraction and an exponent."""
    if isinstance(value, str):
        return Decimal(value) if _NUMBER.fullmatch(value) else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | Fraction) and not isinstance(value, bool) else None


def as_boolean(value: object) -> bool | None:
    """Read a bool, 1 or 0, or one of the words true, false, yes, no, on, off in any case."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in {0, 1}:
        return value == 1
    word = value.lower() if isinstance(value, str) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def shown(value: object) -> str:
    """Print a value for a message: at most 40 characters, ASCII, without control characters."""
    if isinstance(value, bool):
        return str(value).lower()  # as JSON spells it
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        text = value[: _MAX_SHOWN + 1] or "an empty text"
        text = text if text.isascii() and text.isprintable() else ascii(text)
    elif isinstance(value, int | float | Fraction | Decimal):
        text = str(value)
    else:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
