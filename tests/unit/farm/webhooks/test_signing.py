"""Signatures that receivers' own libraries accept, and refuse when anything was changed."""

import base64
import json
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from openai import InvalidWebhookSignatureError, OpenAI
from standardwebhooks import Webhook, WebhookVerificationError

from farm.webhooks.signing import (
    hint,
    new_private_key,
    new_secret,
    public_jwk,
    public_key,
    secret_bytes,
    sign,
)

BODY = json.dumps({"id": "evt_1", "type": "video.completed", "data": {"id": "video_1"}}).encode()


@pytest.mark.req("F-30")
def test_reference_library_accepts_and_refuses_changes() -> None:
    secret = new_secret()
    now_s = int(time.time())
    headers = sign("evt_1", now_s, BODY, [secret])
    assert Webhook(secret).verify(BODY, headers)["id"] == "evt_1"
    changed = [
        (BODY + b" ", headers),
        (BODY, {**headers, "webhook-id": "evt_2"}),
        (BODY, sign("evt_1", now_s - 3600, BODY, [secret])),
        (BODY, sign("evt_1", now_s, BODY, [new_secret()])),
    ]
    for body, bad in changed:
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, bad)


@pytest.mark.req("F-30")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_sdk_accepts_and_refuses_changes() -> None:
    secret = new_secret()
    client = OpenAI(api_key="unused", webhook_secret=secret)
    headers = sign("evt_1", int(time.time()), BODY, [secret])
    client.webhooks.verify_signature(BODY, headers)
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.verify_signature(BODY + b" ", headers)


def test_both_secrets_verify_during_a_rotation() -> None:
    old, new = new_secret(), new_secret()
    headers = sign("evt_1", int(time.time()), BODY, [new, old])
    for secret in (old, new):
        Webhook(secret).verify(BODY, headers)


@pytest.mark.req("F-30")
def test_a_public_key_confirms_the_asymmetric_signature_of_the_same_text() -> None:
    private = new_private_key()
    headers = sign("evt_1", 1_700_000_000, BODY, [new_secret(), private])
    shared, asymmetric = headers["webhook-signature"].split(" ")
    assert (shared[:3], asymmetric[:4]) == ("v1,", "v1a,")
    raw = base64.b64decode(public_key(private).removeprefix("whpk_"))
    signed = b"evt_1.1700000000." + BODY
    Ed25519PublicKey.from_public_bytes(raw).verify(base64.b64decode(asymmetric[4:]), signed)
    x = public_jwk(private, "k1")["x"]
    assert base64.urlsafe_b64decode(x + "=") == raw


def test_a_hint_shows_the_end_only() -> None:
    secret = new_secret()
    assert hint(secret) == f"whsec_...{secret[-4:]}"


@pytest.mark.parametrize(
    "text", ["", "whsec_", "whsec_!!!!", "whsec_c2hvcnQ=", "AAAA" * 11, "whsec_" + "A" * 200]
)
def test_a_malformed_secret_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="a signing secret is whsec_"):
        secret_bytes(text)
