"""Names of rows: a prefix that says the kind, then a ULID in lower case.

Ids sort by creation time to the millisecond, hold 80 random bits, and contain no dot (webhook signatures join
with dots). They are names, not secrets, and nothing is decided by the time in them.
"""

import re
import secrets

from farm.clock import now

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ULID = re.compile(r"[0-7][0-9abcdefghjkmnpqrstvwxyz]{25}")


def new_id(prefix: str) -> str:
    """Return a fresh id such as `video_01j9...`."""
    value = int(now().timestamp() * 1000) << 80 | secrets.randbits(80)
    return f"{prefix}_{_base32(value)}"


def is_id(text: str, prefix: str) -> bool:
    """Tell whether a text has the form that `new_id(prefix)` makes."""
    head, _, tail = text.partition("_")
    return head == prefix and _ULID.fullmatch(tail) is not None


def _base32(value: int) -> str:
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))
