"""Secrets at rest: authenticated encryption under a key derived from `SECRET_KEY`."""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr

from farm.errors import SettingsError

_VERSION = b"\x01"
_NONCE_BYTES = 12


def seal(secret_key: SecretStr, text: str) -> bytes:
    """Encrypt a text for storage."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return _VERSION + nonce + _cipher(secret_key).encrypt(nonce, text.encode(), _VERSION)


def unseal(secret_key: SecretStr, sealed: bytes) -> str:
    """Decrypt what `seal` made.

    Raises:
        SettingsError: It was sealed under another SECRET_KEY, or damaged.
    """
    version, nonce, body = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
    try:
        return _cipher(secret_key).decrypt(nonce, body, version).decode()
    except (InvalidTag, ValueError):
        raise SettingsError(
            "a stored secret does not open with FARM_SECRET_KEY; was the key changed? "
            "Restore the former key, or rotate the webhook secrets"
        ) from None


def _cipher(secret_key: SecretStr) -> AESGCM:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"magi2-farm secretbox")
    return AESGCM(derived.derive(secret_key.get_secret_value().encode()))
