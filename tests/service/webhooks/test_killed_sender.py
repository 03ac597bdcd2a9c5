"""kill -9 of a real ticker between POST and commit: the same message goes out again and none is lost."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest
from standardwebhooks import Webhook

from farm.embedded.process import leashed
from tests.service.webhooks.harness import SECRET, Outbox, wait_until
from tests.service.webhooks.receiver import Receiver, answer

ROOT = Path(__file__).parents[3]
NUM_JOBS = 4


@pytest.fixture
def start_ticker(farm_environment, tmp_path):
    """Return a function that starts a ticker process which may call loopback."""
    environment = {
        **farm_environment,
        "FARM_WEBHOOK__ALLOW_HTTP": "true",
        "FARM_WEBHOOK__ALLOW_CIDRS": "127.0.0.0/8",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / f"ticker{len(started)}.log").open("wb") as log:
            command = leashed([sys.executable, "-m", "worker.ticker"])
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, start_new_session=True)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


class Ambush:
    """Kills the sender in the middle of its first delivery, once."""

    def __init__(self, outbox: Outbox, database_url: str, *, answers_first: bool) -> None:
        self.pid = 0
        self.is_done = threading.Event()
        self._outbox = outbox
        self._database_url = database_url
        self._answers_first = answers_first

    def __call__(self, handler) -> None:
        if self.is_done.is_set():
            answer(200)(handler)
            return
        if self._answers_first:
            # The record of the attempt stops at this lock, so the kill falls between answer and commit.
            with psycopg.connect(self._database_url) as conn:
                conn.execute("SELECT FROM webhook_endpoint FOR UPDATE")
                answer(200)(handler)
                wait_until(self._is_recording, "a record that waits")
                os.kill(self.pid, signal.SIGKILL)
        else:
            os.kill(self.pid, signal.SIGKILL)
        handler.close_connection = True
        self.is_done.set()

    def _is_recording(self) -> bool:
        waiting = (
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'magi2-webhooks' AND wait_event_type = 'Lock'"
        )
        return bool(self._outbox.execute(waiting))


@pytest.mark.req("F-31")
@pytest.mark.parametrize("answers_first", [False, True], ids=["before-the-answer", "after-the-answer"])
def test_a_sender_killed_between_post_and_commit_repeats_the_message_and_loses_none(
    outbox: Outbox, receiver: Receiver, start_ticker, database_url: str, *, answers_first: bool
) -> None:
    outbox.endpoint(receiver.url)
    jobs = {outbox.cancel_one() for _ in range(NUM_JOBS)}
    ambush = Ambush(outbox, database_url, answers_first=answers_first)
    receiver.behaviour = ambush
    victim = start_ticker()
    ambush.pid = victim.pid
    wait_until(ambush.is_done.is_set, "the kill")
    assert victim.wait(60) == -signal.SIGKILL
    assert sorted(row.status for row in outbox.deliveries()) == ["leased", "pending", "pending", "pending"]
    assert outbox.attempts() == []  # nothing of it was committed
    outbox.execute(
        "UPDATE webhook_delivery SET lease_until = now() - interval '1 second' WHERE status = 'leased'"
    )
    start_ticker()
    wait_until(outbox.are(*["ok"] * NUM_JOBS), "all deliveries")
    bodies = [Webhook(SECRET).verify(got.body, got.headers) for got in receiver.received]
    ids = [got.headers["webhook-id"] for got in receiver.received]
    assert {body["data"]["id"] for body in bodies} == jobs
    assert ids.count(ids[0]) == 2
    assert len(ids) == len(set(ids)) + 1
