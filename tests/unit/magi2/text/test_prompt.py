"""The encoded text of a request, and where it names the reference image."""

import pytest

from magi2.errors import InvalidInput
from magi2.text.prompt import encoder_text, reference_span

CAPTION = '{"global_layer": {"context": "Harbor"}}'


@pytest.mark.parametrize(
    ("prompt", "without", "with_image"),
    [
        ("A boat.", "A boat.", "A boat.reference_layer:The first frame refers to <Figure 1>"),
        (CAPTION, "context: Harbor", "context: Harbor\nThe first frame refers to <Figure 1>"),
    ],
)
def test_image_is_named_at_the_end_of_the_text(prompt: str, without: str, with_image: str) -> None:
    assert encoder_text(prompt, has_image=False) == without
    assert encoder_text(prompt, has_image=True) == with_image


@pytest.mark.parametrize("prompt", ['{"a":' * 65 + "1" + "}" * 65, "[" * 60_000])
def test_nesting_that_the_contract_did_not_see_is_refused(prompt: str) -> None:
    with pytest.raises(InvalidInput, match="nested too deeply"):
        encoder_text(prompt, has_image=False)
    with pytest.raises(InvalidInput, match="nested too deeply"):
        encoder_text(prompt, has_image=True)


@pytest.mark.parametrize(
    ("text", "span"),
    [("", None), ("<Figure 2>", None), ("<Figure 1>", (0, 10)), ("a <Figure 1> b <Figure 1>", (2, 12))],
)
def test_first_mention_of_the_image_counts(text: str, span: tuple[int, int] | None) -> None:
    assert reference_span(text) == span
