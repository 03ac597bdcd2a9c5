"""The negative prompt is the published one, to the byte."""

import hashlib

from magi2.caption import normalise
from magi2.text.negative import NEGATIVE_PROMPT


def test_negative_prompt_has_the_published_digest() -> None:
    digest = hashlib.sha256(NEGATIVE_PROMPT.encode()).hexdigest()
    assert digest == "5ac0746de6c7e0388a16122d9c7e751b1cb067242218bf6f41ec1e88271cdcb9"


def test_negative_prompt_is_plain_text_on_one_line() -> None:
    assert len(NEGATIVE_PROMPT) == 1721
    assert "\n" not in NEGATIVE_PROMPT
    assert normalise(NEGATIVE_PROMPT) == NEGATIVE_PROMPT
