"""Secrets at rest open with the same key only, and show when they were touched."""

import pytest
from pydantic import SecretStr

from farm.errors import SettingsError
from farm.secretbox import seal, unseal

KEY = SecretStr("0123456789abcdef0123456789abcdef")


def test_what_was_sealed_opens_again():
    assert unseal(KEY, seal(KEY, "whsec_abc")) == "whsec_abc"


def test_the_sealed_form_neither_shows_nor_repeats_the_text():
    first, second = seal(KEY, "whsec_abc"), seal(KEY, "whsec_abc")
    assert first != second
    assert b"whsec" not in first


def test_another_key_is_refused_with_a_remedy():
    with pytest.raises(SettingsError, match="FARM_SECRET_KEY"):
        unseal(SecretStr("another key that is long enough...."), seal(KEY, "whsec_abc"))


@pytest.mark.parametrize("position", [0, 5, -1])
def test_a_changed_byte_is_noticed(position):
    sealed = bytearray(seal(KEY, "whsec_abc"))
    sealed[position] ^= 1
    with pytest.raises(SettingsError):
        unseal(KEY, bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"\x01", b"\x01" + bytes(12)])
def test_a_stump_is_refused(sealed):
    with pytest.raises(SettingsError):
        unseal(KEY, sealed)
