"""Secrets at rest: authenticated encryption under a key derived from `SECRET_KEY`."""

from pydantic import SecretStr


def seal(secret_key: SecretStr, text: str) -> bytes:
    """Encrypt a text for storage."""
    ...


def unseal(secret_key: SecretStr, sealed: bytes) -> str:
    """Decrypt what `seal` made.

    Raises:
        SettingsError: It was sealed under another SECRET_KEY, or damaged.
    """
    ...
