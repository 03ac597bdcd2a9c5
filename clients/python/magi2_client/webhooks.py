"""Verification of webhooks (Standard Webhooks): signature and age, with the standard library only."""

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from typing import Any

TOLERANCE_S = 300
_PREFIX = "whsec_"


class WebhookError(Exception):
    """The request is not a fresh webhook of the farm."""


def verify_webhook(
    body: bytes, headers: Mapping[str, str], secret: str, *, tolerance_s: float = TOLERANCE_S
) -> dict[str, Any]:
    """Return the event, if this secret signed exactly these bytes a moment ago.

    Args:
        body: As it came, before any parsing.
        headers: Of the request; `webhook-id`, `webhook-timestamp` and `webhook-signature` are read.
        secret: What the farm showed once: `whsec_` and base64.
        tolerance_s: How old or early it may be.

    Raises:
        WebhookError: A header is missing, the time is too far off, or no signature fits.
    """
    given = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, sent_at, signatures = (
            given[f"webhook-{name}"] for name in ("id", "timestamp", "signature")
        )
        age_s = abs(time.time() - int(sent_at))
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (KeyError, ValueError, binascii.Error) as exc:
        raise WebhookError(
            "a header is missing or malformed, or the secret is not whsec_ and base64"
        ) from exc
    if age_s > tolerance_s:
        raise WebhookError(f"the webhook is {age_s:.0f} s old; at most {tolerance_s:g} s are accepted")
    signed = f"{message_id}.{sent_at}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    if not any(hmac.compare_digest(expected, signature) for signature in signatures.split()):
        raise WebhookError("no signature fits")
    event: dict[str, Any] = json.loads(body)
    return event
