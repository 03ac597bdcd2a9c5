"""The rules for the prompt of a request: what it may hold, before any tokenizer sees it.

Text comes as it is; a caption may also come as a JSON object and is then written as JSON text. Size,
characters and nesting are checked before anything recurses into the prompt, so no prompt raises here.
Whether the tokens fit is for the holder of the tokenizer to say.
"""

import json

from magi2.caption import MAX_NESTING, add_reference_marker, normalise, text_nesting, value_nesting
from magi2.values import shown

_BAD = "the prompt holds invalid characters"
# What only the encoder finds, after everything here has passed; it does not say which of the two.
UNREADABLE_PROMPT = ("prompt_invalid", f"{_BAD} or is nested too deeply")
_TOO_DEEP = ("prompt_invalid", f"the prompt is nested too deeply; at most {MAX_NESTING} levels are supported")
_HAS_NUL = ("prompt_invalid", f"{_BAD}: NUL (U+0000); remove it")
_HAS_SURROGATE = ("prompt_invalid", f"{_BAD}: half of a surrogate pair (U+D800 to U+DFFF); remove it")
_NO_JSON = ("prompt_invalid", f"{_BAD}: the caption has a value that JSON cannot spell")


def read_prompt(value: object, max_chars: int, *, has_image: bool) -> tuple[str, tuple[str, str] | None]:
    """Return the prompt as text, and the first broken rule as (code, message) or None."""
    try:
        prompt = _written(value, max_chars) if isinstance(value, dict) else value
    except OverflowError:
        return "", _too_long(f"more than {max_chars}", max_chars)
    except RecursionError:
        return "", _TOO_DEEP
    except (TypeError, ValueError):  # no JSON value, or a number of thousands of digits
        return "", _NO_JSON
    if prompt is not None and not isinstance(prompt, str):
        return "", ("prompt_missing", f"prompt must be a text or a caption object (got {shown(prompt)})")
    if prompt is None or not prompt.strip():
        return "", ("prompt_missing", "prompt is required and must not be blank")
    return prompt, _text_problem(prompt, max_chars, has_image=has_image)


def _written(caption: dict[object, object], max_chars: int) -> str:
    if value_nesting(caption, max_values=max_chars) > MAX_NESTING:
        raise RecursionError
    return json.dumps(caption, ensure_ascii=False)


def _text_problem(prompt: str, max_chars: int, *, has_image: bool) -> tuple[str, str] | None:
    if len(prompt) > max_chars:
        return _too_long(str(len(prompt)), max_chars)
    unreadable = _unreadable(prompt)
    if unreadable:
        return unreadable
    text = normalise(prompt)
    # Adding the marker writes JSON anew, and an escaped surrogate then stands in the text itself.
    marked = normalise(add_reference_marker(prompt)) if has_image else text
    if not (_is_encodable(text) and _is_encodable(marked)):
        return _HAS_SURROGATE
    if not text.strip():
        remedy = "put the caption under global_layer"
        return (
            "prompt_empty_after_normalisation",
            f"the JSON prompt contains no usable caption text; {remedy}",
        )
    return None


def _unreadable(prompt: str) -> tuple[str, str] | None:
    # NUL has no place in a PostgreSQL text and no meaning for the tokenizer.
    if "\0" in prompt:
        return _HAS_NUL
    if not _is_encodable(prompt):
        return _HAS_SURROGATE
    return _TOO_DEEP if text_nesting(prompt) > MAX_NESTING else None


def _too_long(num_chars: str, max_chars: int) -> tuple[str, str]:
    return "prompt_too_long", f"prompt is {num_chars} characters; at most {max_chars} are supported"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
