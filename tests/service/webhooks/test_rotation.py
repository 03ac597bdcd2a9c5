"""Real deliveries and the receivers' own libraries: before, during and after a rotation of the secret."""

import base64
import json
import time

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from openai import InvalidWebhookSignatureError, OpenAI
from standardwebhooks import Webhook, WebhookVerificationError

from farm.db.session import unit_of_work
from farm.secretbox import seal, unseal
from farm.webhooks.endpoints import ED25519, HMAC, OVERLAP_S, rotate_secrets, update_endpoint
from farm.webhooks.signing import new_private_key, new_secret, public_key, sign
from tests.service.webhooks.harness import SECRET
from tests.service.webhooks.receiver import Received

pytestmark = [pytest.mark.req("F-30"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def standard(secret: str, body: bytes, headers: dict[str, str]) -> bool:
    try:
        Webhook(secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


def openai(secret: str, body: bytes, headers: dict[str, str]) -> bool:
    try:
        OpenAI(api_key="unused", webhook_secret=secret).webhooks.verify_signature(body, headers)
    except InvalidWebhookSignatureError:
        return False
    return True


VERIFIERS = (standard, openai)


def asymmetric(public: str, got: Received) -> int:
    """Return how many of the v1a signatures a public key confirms."""
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public.removeprefix("whpk_")))
    signed = f"{got.headers['webhook-id']}.{got.headers['webhook-timestamp']}.".encode() + got.body
    confirmed = 0
    for part in got.headers["webhook-signature"].split():
        version, _, signature = part.partition(",")
        if version == "v1a":
            try:
                key.verify(base64.b64decode(signature), signed)
            except InvalidSignature:
                continue
            confirmed += 1
    return confirmed


@pytest.fixture
def rotate(outbox, settings, database):
    """Return a function that gives an endpoint a new secret and returns it."""

    def act(endpoint_id: str, overlap_s: float) -> str:
        secret = new_secret()
        with unit_of_work(database) as conn:
            sealed = {HMAC: seal(settings.secret_key, secret)}
            rotate_secrets(conn, outbox.account_id, endpoint_id, sealed, overlap_s=overlap_s)
        return secret

    return act


@pytest.fixture
def tell(outbox, receiver, send_until_met):
    """Return a function that ends a job and returns what the receiver got."""

    def act() -> Received:
        count = len(receiver.received)
        outbox.cancel_one()
        send_until_met(lambda: len(receiver.received) > count)
        return receiver.received[-1]

    return act


def test_libraries_accept_the_right_secrets_before_during_and_after_a_rotation(
    outbox, receiver, rotate, tell
) -> None:
    endpoint = outbox.endpoint(receiver.url)
    before = tell()
    new = rotate(endpoint.id, OVERLAP_S)
    during = tell()
    outbox.execute("UPDATE webhook_secret SET retire_at = now() WHERE retire_at IS NOT NULL")
    after = tell()
    for verify in VERIFIERS:
        accepted = [
            (verify(SECRET, got.body, got.headers), verify(new, got.body, got.headers))
            for got in (before, during, after)
        ]
        assert accepted == [(True, False), (True, True), (False, True)]
    num_signatures = [len(got.headers["webhook-signature"].split()) for got in (before, during, after)]
    assert num_signatures == [1, 2, 1]


def test_a_rotation_at_once_drops_the_old_secret(outbox, receiver, rotate, tell) -> None:
    endpoint = outbox.endpoint(receiver.url)
    new = rotate(endpoint.id, 0)
    got = tell()
    assert [verify(SECRET, got.body, got.headers) for verify in VERIFIERS] == [False, False]
    assert [verify(new, got.body, got.headers) for verify in VERIFIERS] == [True, True]
    assert outbox.execute("SELECT count(*) FROM webhook_secret")[0].count == 1


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("is_rotating", [False, True])
def test_libraries_refuse_whatever_was_changed(outbox, receiver, rotate, tell, verify, is_rotating) -> None:
    endpoint = outbox.endpoint(receiver.url)
    secret = rotate(endpoint.id, OVERLAP_S) if is_rotating else SECRET
    got = tell()
    assert verify(secret, got.body, got.headers)
    old_s = int(time.time()) - 3600
    assert not verify(secret, got.body + b" ", got.headers)
    assert not verify(secret, got.body, {**got.headers, "webhook-id": "evt_other"})
    assert not verify(secret, got.body, {**got.headers, "webhook-timestamp": str(old_s)})
    message = got.headers["webhook-id"]
    assert not verify(secret, got.body, sign(message, old_s, got.body, [secret]))
    assert not verify(new_secret(), got.body, got.headers)


def test_secrets_that_overlap_are_few_however_often_they_are_rotated(outbox, receiver, rotate, tell) -> None:
    endpoint = outbox.endpoint(receiver.url)
    newest = [rotate(endpoint.id, OVERLAP_S) for _ in range(8)][-1]
    got = tell()
    assert len(got.headers["webhook-signature"].split()) == 5
    assert all(verify(newest, got.body, got.headers) for verify in VERIFIERS)


def test_a_public_key_confirms_deliveries_and_both_keys_do_during_a_rotation(
    outbox, receiver, tell, settings, database
) -> None:
    endpoint = outbox.endpoint(receiver.url)
    old, new = new_private_key(), new_private_key()
    with unit_of_work(database) as conn:
        update_endpoint(conn, outbox.account_id, endpoint.id, {}, ed25519=seal(settings.secret_key, old))
    before = tell()
    with unit_of_work(database) as conn:
        sealed = {
            HMAC: seal(settings.secret_key, new_secret()),
            ED25519: seal(settings.secret_key, new),
        }
        rotate_secrets(conn, outbox.account_id, endpoint.id, sealed, overlap_s=OVERLAP_S)
    during = tell()
    keys = [public_key(key) for key in (old, new)]
    assert [asymmetric(key, got) for got in (before, during) for key in keys] == [1, 0, 1, 1]
    # HMAC verifiers are not confused by the other signatures.
    assert all(verify(SECRET, got.body, got.headers) for got in (before, during) for verify in VERIFIERS)


def test_secrets_are_encrypted_at_rest(outbox, receiver, settings) -> None:
    outbox.endpoint(receiver.url)
    (row,) = outbox.execute("SELECT ciphertext FROM webhook_secret")
    raw = base64.b64decode(SECRET.removeprefix("whsec_"))
    assert SECRET.encode() not in bytes(row.ciphertext)
    assert raw not in bytes(row.ciphertext)
    assert unseal(settings.secret_key, bytes(row.ciphertext)) == SECRET


def test_the_body_is_compact_and_small(outbox, receiver, tell) -> None:
    outbox.endpoint(receiver.url)
    got = tell()
    assert got.body == json.dumps(json.loads(got.body), ensure_ascii=False, separators=(",", ":")).encode()
    assert len(got.body) < 20_000
