"""Signatures that receivers' own libraries accept, and refuse when anything was changed."""

import json
import time

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from standardwebhooks import Webhook, WebhookVerificationError

from farm.webhooks.signing import new_secret, secret_bytes, sign

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


@pytest.mark.parametrize(
    "text", ["", "whsec_", "whsec_!!!!", "whsec_c2hvcnQ=", "AAAA" * 11, "whsec_" + "A" * 200]
)
def test_a_malformed_secret_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="a signing secret is whsec_"):
        secret_bytes(text)
