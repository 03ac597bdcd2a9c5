"""The sender: one signed POST for an ending, at most one lease at a time, nothing lost when it is killed."""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook

from farm.accounts import ensure_account
from farm.db.session import unit_of_work
from farm.db.tables import webhook_attempt, webhook_delivery, webhook_endpoint, webhook_message
from farm.jobs.claim import claim
from farm.jobs.control import request_cancel
from farm.jobs.job import NewAsset
from farm.jobs.lifecycle import Result, mark_running, mark_uploading, succeed
from farm.jobs.submit import JobWebhook, Submission, submit
from farm.secretbox import seal
from farm.webhooks.deliveries import Outcome, Room, record, take_due
from farm.webhooks.guard import Policy
from farm.webhooks.messages import DEFAULT_EVENT_TYPES
from farm.webhooks.signing import new_secret
from magi2.contract import CONTRACT_VERSION, default_limits, validate
from tests.service.webhooks.receiver import Receiver, answer, hang_up
from worker.host_lookup import HostLookups
from worker.webhook_post import make_client
from worker.webhook_sender import Sender, send_until

SECRET = new_secret()
ROOM = Room(healthy=10, failing=10, per_account=10)
PROMPT = "A paper boat crosses a puddle."


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def submit_job(database, settings):
    """Return a function that queues a job whose endings are told to one URL."""

    def make(url: str) -> tuple[str, str]:
        request = validate(
            {"prompt": PROMPT, "resolution": "272p", "seed": 7}, limits=default_limits()
        ).request
        hook = JobWebhook(url, DEFAULT_EVENT_TYPES, seal(settings.secret_key, SECRET))
        with unit_of_work(database) as conn:
            account_id = ensure_account(conn, "hooks")
            job = submit(
                conn,
                Submission(
                    account_id=account_id,
                    request=request,
                    profile="tiny-cpu",
                    exec_timeout_s=900,
                    retention_s=3600,
                    webhook=hook,
                ),
            )
        return account_id, job.id

    return make


@pytest.fixture
def cancel_job(database, submit_job):
    """Return a function that queues a job and ends it at once, so that one delivery is due."""

    def make(url: str) -> str:
        account_id, job_id = submit_job(url)
        with unit_of_work(database) as conn:
            request_cancel(conn, account_id, job_id, "test")
        return job_id

    return make


def run_sender(
    settings, database, object_store, *, until, resolver=None, policy: Policy | None = None
) -> None:
    """Run a sender beside this thread until a condition holds."""
    stop = threading.Event()
    allowed = policy or Policy.from_settings(allow_http=True, allow_cidrs=["127.0.0.0/8"])

    async def send() -> None:
        async with make_client(16) as client:
            lookups = HostLookups(allowed, resolver) if resolver else HostLookups(allowed)
            await send_until(Sender(settings, database, object_store, client, lookups), stop)

    thread = threading.Thread(target=lambda: asyncio.run(send()))
    thread.start()
    deadline_s = time.monotonic() + 30
    while not (is_met := until()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    stop.set()
    thread.join()
    assert is_met


def deliveries(database) -> list[sa.Row]:
    with unit_of_work(database) as conn:
        return list(conn.execute(sa.select(webhook_delivery).order_by(webhook_delivery.c.id)))


def attempts(database) -> list[sa.Row]:
    with unit_of_work(database) as conn:
        return list(conn.execute(sa.select(webhook_attempt).order_by(webhook_attempt.c.n)))


def settled(database, status: str):
    return lambda: [row.status for row in deliveries(database)] == [status]


def tried(database, count: int):
    return lambda: len(attempts(database)) == count


@pytest.mark.req("F-31")
def test_a_finished_clip_is_told_once_signed_and_with_a_working_link(
    settings, database, object_store, receiver, submit_job, tmp_path: Path
) -> None:
    _, job_id = submit_job(receiver.url)
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"not really a clip")
    stored = object_store.put(f"v1/test/{job_id}/video.mp4", clip, "video/mp4")
    with unit_of_work(database) as conn:
        held = claim(
            conn, group_id="grp_1", profile="tiny-cpu", boot_id="b", contract_versions=[CONTRACT_VERSION]
        )
    for move in (mark_running, mark_uploading):
        with unit_of_work(database) as conn:
            assert move(conn, job_id, held.epoch)
    with unit_of_work(database) as conn:
        asset = NewAsset("video", stored.key, stored.bytes, stored.sha256, "video/mp4", 448, 256)
        assert succeed(conn, job_id, held.epoch, Result(data={}, assets=[asset]))
        # In the transaction of the state change, before it commits:
        assert conn.execute(sa.select(sa.func.count()).select_from(webhook_message)).scalar_one() == 1
    run_sender(settings, database, object_store, until=settled(database, "ok"))
    (got,) = receiver.received
    body = Webhook(SECRET).verify(got.body, got.headers)
    assert body["type"] == "video.completed"
    assert body["data"]["id"] == job_id
    assert got.headers["webhook-id"] == body["id"]
    assert PROMPT.encode() not in got.body
    with urllib.request.urlopen(body["data"]["urls"]["download"]) as answered:
        assert answered.read() == b"not really a clip"


def test_a_failing_receiver_is_tried_again_with_the_same_id(
    settings, database, object_store, receiver, cancel_job
) -> None:
    cancel_job(receiver.url)
    receiver.behaviour = answer(500, body=b"broken")
    run_sender(settings, database, object_store, until=tried(database, 1))
    receiver.behaviour = answer(200)
    with unit_of_work(database) as conn:
        (row,) = conn.execute(sa.select(webhook_delivery))
        assert row.status == "pending"
        conn.execute(sa.update(webhook_delivery).values(next_attempt_at=sa.func.now()))
    run_sender(settings, database, object_store, until=settled(database, "ok"))
    assert len({got.headers["webhook-id"] for got in receiver.received}) == 1
    assert [(row.n, row.http_status, row.error) for row in attempts(database)] == [
        (1, 500, "http_500"),
        (2, 200, None),
    ]
    assert attempts(database)[0].response_excerpt == "broken"


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [(answer(302, {"location": "http://127.0.0.1:1/"}), "http_302"), (hang_up, "connection_broken")],
    ids=["redirect", "hang-up"],
)
def test_redirects_are_not_followed_and_broken_answers_are_failures(
    settings, database, object_store, receiver, cancel_job, behaviour, error
) -> None:
    cancel_job(receiver.url)
    receiver.behaviour = behaviour
    run_sender(settings, database, object_store, until=tried(database, 1))
    assert attempts(database)[0].error == error
    assert len(receiver.received) == 1


def test_gone_disables_the_endpoint(settings, database, object_store, receiver, cancel_job) -> None:
    cancel_job(receiver.url)
    receiver.behaviour = answer(410)
    run_sender(settings, database, object_store, until=settled(database, "dead"))
    with unit_of_work(database) as conn:
        row = conn.execute(sa.select(webhook_endpoint)).one()
    assert not row.enabled
    assert "410" in row.disabled_reason


def test_a_huge_answer_is_not_read_to_its_end(settings, database, object_store, receiver, cancel_job) -> None:
    cancel_job(receiver.url)
    receiver.behaviour = answer(200, body=b"x" * 4_000_000)
    run_sender(settings, database, object_store, until=settled(database, "ok"))
    assert attempts(database)[0].response_excerpt == "x" * 1024


@pytest.mark.req("F-33")
def test_the_address_is_checked_when_sending_and_the_reason_leaks_no_address(
    settings, database, object_store, receiver, cancel_job
) -> None:
    cancel_job(f"http://hooks.example:{receiver.server.server_port}/hook")
    run_sender(
        settings,
        database,
        object_store,
        until=tried(database, 1),
        resolver=lambda _host, _port: ["127.0.0.1"],
        policy=Policy(allow_http=True),
    )
    (row,) = attempts(database)
    assert row.error.startswith("refused_")
    assert "127.0.0.1" not in json.dumps([row.error, row.response_excerpt, row.resolved_ip])
    assert receiver.received == []


@pytest.mark.req("F-33")
def test_the_checked_address_is_called_under_the_given_name(
    settings, database, object_store, receiver, cancel_job
) -> None:
    port = receiver.server.server_port
    cancel_job(f"http://hooks.example:{port}/hook")
    run_sender(
        settings,
        database,
        object_store,
        until=settled(database, "ok"),
        resolver=lambda _host, _port: ["127.0.0.1"],
    )
    assert receiver.received[0].headers["host"] == f"hooks.example:{port}"


@pytest.mark.req("F-32")
def test_a_receiver_that_never_answers_holds_up_nobody(
    settings, database, object_store, receiver, cancel_job
) -> None:
    released = threading.Event()
    slow = Receiver(behaviour=lambda handler: (released.wait(20), answer(200)(handler)))
    try:
        for _ in range(3):
            cancel_job(slow.url)
        quick_job = cancel_job(receiver.url)
        run_sender(
            settings, database, object_store, until=lambda: bool(receiver.received) and not released.set()
        )
    finally:
        released.set()
        slow.close()
    assert json.loads(receiver.received[0].body)["data"]["id"] == quick_job


def test_a_delivery_whose_sender_was_killed_goes_out_again_and_the_late_record_changes_nothing(
    database, cancel_job
) -> None:
    cancel_job("http://127.0.0.1:9/hook")
    with unit_of_work(database) as conn:
        (first,) = take_due(conn, ROOM)
    with unit_of_work(database) as conn:
        assert take_due(conn, ROOM) == []  # leased: nobody else gets it
        conn.execute(sa.update(webhook_delivery).values(lease_until=sa.text("now() - interval '1 second'")))
    with unit_of_work(database) as conn:
        (second,) = take_due(conn, ROOM)
    assert second.message_id == first.message_id
    with unit_of_work(database) as conn:
        assert record(conn, [(first, Outcome(1, http_status=200))]).kept == frozenset()
    assert [row.status for row in deliveries(database)] == ["leased"]
    with unit_of_work(database) as conn:
        assert record(conn, [(second, Outcome(1, http_status=200))]).kept == {second.id}
    assert [row.status for row in deliveries(database)] == ["ok"]


def test_many_senders_never_take_the_same_delivery_twice(database, cancel_job) -> None:
    for _ in range(12):
        cancel_job("http://127.0.0.1:9/hook")
    taken: list[str] = []

    def take() -> None:
        for _ in range(6):
            with unit_of_work(database) as conn:
                taken.extend(delivery.id for delivery in take_due(conn, Room(3, 3, 3)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 12
