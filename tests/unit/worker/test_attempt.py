import json

import pytest

from worker.attempt import MAX_DETAIL_CHARS, plain


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("a\0b", "ab"),
        ("\ud800x", "?x"),
        ({"a\0": ["b\0", 1, None, 1.5, True]}, {"a": ["b", 1, None, 1.5, True]}),
        (("x", "y"), ["x", "y"]),
    ],
)
def test_evidence_is_made_storable(value, stored):
    assert plain(value) == stored
    json.dumps(plain(value)).encode("utf-8")


def test_long_evidence_keeps_its_end():
    text = plain("x" * 20_000 + "the point")
    assert len(text) == MAX_DETAIL_CHARS
    assert text.endswith("the point")
