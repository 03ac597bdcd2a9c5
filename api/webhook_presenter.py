"""Turns the rows of webhook management into the answers that tenants see.

Leaves out what is for operators: the receiver's answer and the address that was called.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from api.webhook_schemas import WebhookAttempt, WebhookDelivery
from farm.errors import SettingsError
from farm.jobs.video_object import rfc3339
from farm.webhooks.delivery_log import Attempt, DeliveryRow
from farm.webhooks.endpoints import ED25519, HMAC, Endpoint, Secret
from farm.webhooks.signing import hint, public_jwk, public_key

Shown = dict[str, Any]
Unseal = Callable[[bytes], str]


def show_endpoint(endpoint: Endpoint, unseal: Unseal) -> Shown:
    """Return the members of an endpoint, without its secret."""
    secret, key = (_open(endpoint.newest(kind), unseal) for kind in (HMAC, ED25519))
    ends = [item.retire_at for item in endpoint.secrets if item.kind == HMAC and item.retire_at]
    return {
        "id": endpoint.id,
        "created_at": int(endpoint.created_at.timestamp()),
        "updated_at": int(endpoint.updated_at.timestamp()),
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": hint(secret) if secret else None,
        "video_id": endpoint.job_id,
        "payload": endpoint.payload_mode,
        "max_in_flight": endpoint.max_in_flight,
        "enabled": endpoint.enabled,
        "disabled_reason": endpoint.disabled_reason,
        "failing_since": _unix(endpoint.failing_since),
        "old_secret_expires_at": _unix(max(ends, default=None)),
        "ed25519_public_key": public_key(key) if key else None,
    }


def show_delivery(row: DeliveryRow) -> WebhookDelivery:
    """Return a delivery."""
    return WebhookDelivery(
        id=row.id,
        webhook_endpoint_id=row.endpoint_id,
        event_id=row.message_id,
        event_type=row.type,
        video_id=row.job_id,
        status=row.status,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        created_at=int(row.created_at.timestamp()),
        next_attempt_at=int(row.next_attempt_at.timestamp()) if row.status == "pending" else None,
        last_status_code=row.last_status,
        last_error=row.last_error,
    )


def show_attempt(attempt: Attempt) -> WebhookAttempt:
    """Return one line of the log."""
    return WebhookAttempt(
        n=attempt.n,
        at=rfc3339(attempt.at),
        duration_ms=attempt.duration_ms,
        status_code=attempt.http_status,
        error=attempt.error,
    )


def show_keys(secrets: Sequence[Secret], unseal: Unseal) -> list[dict[str, str]]:
    """Return the public halves of Ed25519 keys as JWKs."""
    opened = [(secret, _open(secret, unseal)) for secret in secrets]
    return [
        public_jwk(key, secret.id) | {"webhook_endpoint_id": secret.endpoint_id}
        for secret, key in opened
        if key is not None
    ]


def _open(secret: Secret | None, unseal: Unseal) -> str | None:
    """Return the text of a secret; None where it cannot be opened any more, and so signs nothing."""
    if secret is None:
        return None
    try:
        return unseal(secret.ciphertext)
    except SettingsError:
        return None


def _unix(at: datetime | None) -> int | None:
    return int(at.timestamp()) if at else None
