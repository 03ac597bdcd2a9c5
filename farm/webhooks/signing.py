"""Standard Webhooks signatures: what a delivery's three headers hold, and what a signing secret looks like.

Promises: the reference library and the OpenAI SDK accept these headers as they are. The signed text is the
message id, the second of this attempt and the exact body bytes, joined by dots. Two kinds of secrets: shared
ones (`whsec_`, HMAC-SHA256, signature `v1`) and Ed25519 private keys (`whsk_`, signature `v1a`), whose public
half (`whpk_`, or a JWK) receivers may have. Keeps no secret, reads no clock.
"""

import base64
import binascii
import hmac
import secrets
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SECRET_PREFIX = "whsec_"  # noqa: S105 - the public mark of a secret, not one
PRIVATE_PREFIX = "whsk_"
PUBLIC_PREFIX = "whpk_"
SECRET_BYTES = 32
MIN_SECRET_BYTES = 24  # the shortest and longest that the Standard Webhooks specification allows
MAX_SECRET_BYTES = 64


def new_secret() -> str:
    """Draw a signing secret, in the text form that receivers configure."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode("ascii")


def secret_bytes(secret: str) -> bytes:
    """Decode a signing secret.

    Raises:
        ValueError: It is not `whsec_` and base64 of 24 to 64 bytes; the message does not repeat it.
    """
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise ValueError("a signing secret is whsec_ followed by base64") from exc
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"a signing secret is whsec_ followed by base64 of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
        )
    return key


def new_private_key() -> str:
    """Draw an Ed25519 private key; it never leaves the farm."""
    return PRIVATE_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode("ascii")


def public_key(private_key: str) -> str:
    """Return the public half in the text form of Standard Webhooks."""
    return PUBLIC_PREFIX + base64.b64encode(_raw_public_key(private_key)).decode("ascii")


def public_jwk(private_key: str, key_id: str) -> dict[str, str]:
    """Return the public half as a JSON Web Key (RFC 8037)."""
    x = base64.urlsafe_b64encode(_raw_public_key(private_key)).rstrip(b"=").decode("ascii")
    return {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": key_id, "use": "sig", "alg": "EdDSA"}


def hint(secret: str) -> str:
    """Return what may be shown of a secret: enough to tell two apart."""
    return f"{SECRET_PREFIX}...{secret[-4:]}"


def sign(message_id: str, timestamp_s: int, body: bytes, signing_secrets: Sequence[str]) -> dict[str, str]:
    """Return the three headers of one attempt, signed with every active secret.

    Args:
        message_id: Stable over retries and replays; holds no dot.
        timestamp_s: Unix second of this attempt, not of the event.
        body: The bytes that go out, unchanged.
        signing_secrets: In `whsec_` or `whsk_` form; during a rotation the new and the old ones.
    """
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(_signature(secret, signed) for secret in signing_secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    if secret.startswith(PRIVATE_PREFIX):
        return "v1a," + base64.b64encode(_private_key(secret).sign(signed)).decode("ascii")
    return "v1," + base64.b64encode(hmac.digest(secret_bytes(secret), signed, "sha256")).decode("ascii")


def _private_key(private_key: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(private_key.removeprefix(PRIVATE_PREFIX)))


def _raw_public_key(private_key: str) -> bytes:
    return _private_key(private_key).public_key().public_bytes_raw()
