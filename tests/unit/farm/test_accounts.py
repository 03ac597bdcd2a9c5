"""The form of API keys, which is checked before any database is asked."""

import re

import pytest

from farm.accounts import make_key, parse_key


def test_a_key_has_the_documented_form():
    assert re.fullmatch(r"mk_live_[0-9A-Za-z]{8}_[0-9A-Za-z]{36}", make_key("live").text)


def test_a_key_parses_into_what_it_was_made_of():
    key = make_key("test")
    assert parse_key(key.text) == key


def test_keys_differ():
    assert len({make_key("live").text for _ in range(200)}) == 200


def test_every_single_typo_in_a_key_is_caught_by_its_checksum():
    text = make_key("live").text
    for position in range(len("mk_live_"), len(text)):
        swapped = "x" if text[position] != "x" else "y"
        assert parse_key(text[:position] + swapped + text[position + 1 :]) is None


@pytest.mark.parametrize(
    "text",
    ["", "mk_live_", "Bearer x", "sk-abc", "mk_LIVE_" + "a" * 8 + "_" + "a" * 36, "mk_live_" + "a" * 45],
)
def test_other_texts_are_no_keys(text):
    assert parse_key(text) is None


def test_the_representation_of_a_key_keeps_its_secret():
    key = make_key("live")
    assert key.secret not in repr(key)
    assert key.text not in repr(key)
