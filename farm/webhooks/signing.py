"""Standard Webhooks signatures: what a delivery's three headers hold, and what a signing secret looks like.

Promises: the reference library and the OpenAI SDK accept these headers as they are. The signed text is the
message id, the second of this attempt and the exact body bytes, joined by dots. Keeps no secret, reads no
clock.
"""

import base64
import binascii
import hmac
import secrets
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"  # noqa: S105 - the public mark of a secret, not one
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


def sign(message_id: str, timestamp_s: int, body: bytes, signing_secrets: Sequence[str]) -> dict[str, str]:
    """Return the three headers of one attempt, signed with every active secret.

    Args:
        message_id: Stable over retries and replays; holds no dot.
        timestamp_s: Unix second of this attempt, not of the event.
        body: The bytes that go out, unchanged.
        signing_secrets: In `whsec_` form; during a rotation the new and the old one.
    """
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    signatures = [
        "v1," + base64.b64encode(hmac.digest(secret_bytes(secret), signed, "sha256")).decode("ascii")
        for secret in signing_secrets
    ]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(signatures),
    }
