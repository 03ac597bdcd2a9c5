"""The text that is encoded for a request, and where the reference image is named in it.

Promises what the reference does, to the character: the image marker goes in before the prompt is
normalised, and the first mention of the figure counts. Whether a prompt is allowed is for
`magi2.contract` to say, before this.
"""

from magi2.caption import add_reference_marker, normalise
from magi2.contract import invalid_prompt
from magi2.errors import InvalidInput

FIGURE = "<Figure 1>"


def encoder_text(prompt: str, *, has_image: bool) -> str:
    """Return what the tokenizer gets for a prompt.

    Raises:
        InvalidInput: The prompt is nested too deeply.
    Source: the reference, inference/model/qwen35.py.
    """
    try:
        return normalise(add_reference_marker(prompt) if has_image else prompt)
    except ValueError as error:
        raise InvalidInput([invalid_prompt()]) from error


def reference_span(text: str) -> tuple[int, int] | None:
    """Return the characters [start, stop) of the first mention of the reference image, if there is one."""
    start = text.find(FIGURE)
    return None if start < 0 else (start, start + len(FIGURE))
