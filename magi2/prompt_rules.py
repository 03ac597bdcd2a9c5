"""The rules for the prompt of a request: what it may hold, before any tokenizer sees it.

Text comes as it is; a caption may also come as a JSON object and is then written as JSON text. Size,
characters and nesting are checked before anything recurses into the prompt, so no prompt raises here.
Whether the tokens fit is for the holder of the tokenizer to say.
"""

import json

from magi2.caption import MAX_NESTING, add_reference_marker, normalise, text_nesting, value_nesting

INVALID_PROMPT = ("prompt_invalid", "the prompt holds invalid characters or is nested too deeply")


def read_prompt(value: object, max_chars: int, *, has_image: bool) -> tuple[str, tuple[str, str] | None]:
    """Return the prompt as text, and the first broken rule as (code, message) or None."""
    try:
        prompt = _written(value, max_chars) if isinstance(value, dict) else value
    except OverflowError:
        return "", _too_long(f"more than {max_chars}", max_chars)
    except (TypeError, ValueError):  # too deep, no JSON value, or a number of thousands of digits
        return "", INVALID_PROMPT
    if not isinstance(prompt, str) or not prompt.strip():
        return "", ("prompt_missing", "prompt is required and must not be blank")
    return prompt, _text_problem(prompt, max_chars, has_image=has_image)


def _written(caption: dict[object, object], max_chars: int) -> str:
    if value_nesting(caption, max_values=max_chars) > MAX_NESTING:
        raise ValueError("nested too deeply")
    return json.dumps(caption, ensure_ascii=False)


def _text_problem(prompt: str, max_chars: int, *, has_image: bool) -> tuple[str, str] | None:
    if len(prompt) > max_chars:
        return _too_long(str(len(prompt)), max_chars)
    # NUL has no place in a PostgreSQL text and no meaning for the tokenizer.
    if "\0" in prompt or not _is_encodable(prompt) or text_nesting(prompt) > MAX_NESTING:
        return INVALID_PROMPT
    text = normalise(prompt)
    # Adding the marker writes JSON anew, and an escaped surrogate then stands in the text itself.
    marked = normalise(add_reference_marker(prompt)) if has_image else text
    if not (_is_encodable(text) and _is_encodable(marked)):
        return INVALID_PROMPT
    if not text.strip():
        remedy = "put the caption under global_layer"
        return (
            "prompt_empty_after_normalisation",
            f"the JSON prompt contains no usable caption text; {remedy}",
        )
    return None


def _too_long(num_chars: str, max_chars: int) -> tuple[str, str]:
    return "prompt_too_long", f"prompt is {num_chars} characters; at most {max_chars} are supported"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
