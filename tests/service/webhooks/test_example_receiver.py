"""The receiver that the docs print: 30 lines that verify, keep each event once and answer fast."""

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from farm.embedded.ports import free_ports
from farm.webhooks.signing import new_secret, sign
from tests.service.webhooks.harness import SECRET, wait_until

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "clients/examples/webhook_receiver.py"


@pytest.fixture
def example(tmp_path):
    """Run the example as a process and return its URL and its table."""
    port = free_ports(1)[0]
    environment = {**os.environ, "WEBHOOK_SECRET": SECRET, "WEBHOOK_DB": str(tmp_path / "events.db")}
    with (tmp_path / "example.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, EXAMPLE, str(port)], env=environment, stderr=log)
    url = f"http://127.0.0.1:{port}/"

    def is_up() -> bool:
        try:
            return httpx.get(url, trust_env=False).status_code == 501
        except httpx.TransportError:
            return False

    wait_until(is_up, "the example")
    yield url, lambda: sqlite3.connect(tmp_path / "events.db").execute("SELECT id FROM event").fetchall()
    process.terminate()
    process.wait()


def test_the_docs_print_the_example_as_it_is() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 30
    assert text in (ROOT / "docs/webhooks.md").read_text()


@pytest.mark.req("F-30")
def test_the_example_takes_deliveries_and_keeps_a_repeated_one_once(outbox, example, send_until_met) -> None:
    url, events = example
    outbox.cancel_one(url)
    send_until_met(outbox.are("ok"))
    outbox.execute("UPDATE webhook_delivery SET status = 'pending', next_attempt_at = now()")
    send_until_met(lambda: outbox.tried(2)() and outbox.are("ok")())
    (message,) = outbox.execute("SELECT id FROM webhook_message")
    assert [row.http_status for row in outbox.attempts()] == [204, 204]
    assert events() == [(message.id,)]


@pytest.mark.req("F-30")
@pytest.mark.parametrize(
    "change",
    [
        {"content": b'{"id": "evt_2"}'},
        {"headers": {"webhook-id": "evt_2"}},
        {"headers": {"webhook-timestamp": "1700000000"}},
        {"headers": {"webhook-signature": "v1,AAAA v1a,BBBB"}},
        {"headers": {"webhook-signature": "nonsense"}},
        {"content": b"\xff\xfe"},
    ],
    ids=["body", "id", "timestamp", "signature", "malformed", "not-text"],
)
def test_the_example_refuses_what_was_changed(example, change) -> None:
    url, events = example
    body = b'{"id": "evt_1"}'
    now_s = int(time.time())
    headers = {**sign("evt_1", now_s, body, [SECRET]), **change.get("headers", {})}
    answered = httpx.post(url, content=change.get("content", body), headers=headers, trust_env=False)
    assert answered.status_code == 400
    assert events() == []


def test_the_example_refuses_another_secret(example) -> None:
    url, events = example
    body = b'{"id": "evt_1"}'
    now_s = int(time.time())
    headers = sign("evt_1", now_s, body, [new_secret()])
    assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 400
    assert events() == []
