"""Nobody waits for somebody else's receiver: dead endpoints, their backlogs, and name servers that hang."""

import contextlib
import json
import threading
from collections import Counter

import pytest
import sqlalchemy as sa

from farm.db.session import unit_of_work
from farm.settings import Settings
from farm.webhooks.deliveries import Outcome, Room, record, take_due
from farm.webhooks.guard import system_resolver
from tests.service.webhooks.harness import Outbox, sending, wait_until
from tests.service.webhooks.receiver import Receiver, answer
from worker.host_lookup import PLACES_PER_ACCOUNT

pytestmark = pytest.mark.req("F-32")

NUM_DEAD = 50
NOWHERE = "http://127.0.0.1:9/hook"


@pytest.fixture
def never_answering():
    """A receiver that holds every request until the end of the test."""
    released = threading.Event()
    running = Receiver(behaviour=lambda handler: (released.wait(120), answer(200)(handler)))
    yield running
    released.set()
    running.close()


def patient(settings: Settings) -> Settings:
    """Let requests hang for as long as can be set: none shall end by itself while a test looks at others."""
    webhook = settings.webhook.model_copy(update={"timeout_s": 60})
    return settings.model_copy(update={"webhook": webhook})


def test_fifty_dead_endpoints_with_a_backlog_do_not_slow_a_healthy_one(
    settings, database, object_store, receiver, never_answering, outbox
) -> None:
    for _ in range(NUM_DEAD):
        outbox.endpoint(never_answering.url, max_in_flight=2)
    for _ in range(3):  # more than is let out at a time, so that every dead endpoint has a line
        outbox.cancel_one()
    healthy = Outbox(settings, database, "healthy")
    healthy.endpoint(receiver.url)
    with sending(patient(settings), database, object_store):
        wait_until(lambda: len(never_answering.received) >= NUM_DEAD, "requests that hang")
        job_id = healthy.cancel_one()
        wait_until(lambda: receiver.received, "the healthy endpoint's delivery")
        assert not outbox.attempts()[1:]  # the dead ones are still on the wire
    assert json.loads(receiver.received[0].body)["data"]["id"] == job_id


def test_endpoints_at_their_limit_use_up_no_places(database, outbox) -> None:
    for _ in range(4):
        outbox.endpoint(NOWHERE)
    outbox.cancel_one()
    outbox.cancel_one()
    room = Room(healthy=4, failing=4, per_account=100)
    with unit_of_work(database) as conn:
        assert len(take_due(conn, room)) == 4
    latest = outbox.endpoint(NOWHERE)
    outbox.cancel_one()
    with unit_of_work(database) as conn:
        # The four have older deliveries that are due, but each has one on the wire.
        assert [delivery.endpoint_id for delivery in take_due(conn, room)] == [latest.id]


def test_a_failing_endpoint_sends_one_at_a_time_and_its_first_success_opens_it_again(
    database, outbox
) -> None:
    outbox.endpoint(NOWHERE, max_in_flight=3)
    for _ in range(4):
        outbox.cancel_one()
    room = Room(10, 10, 10)
    with unit_of_work(database) as conn:
        first = take_due(conn, room)
        assert len(first) == 3
        record(conn, [(delivery, Outcome(1, error="timeout")) for delivery in first])
    outbox.hurry()
    with unit_of_work(database) as conn:
        (only,) = take_due(conn, room)
        record(conn, [(only, Outcome(1, http_status=200))])
        assert len(take_due(conn, room)) == 3


def test_endpoints_that_have_failed_for_a_while_have_places_of_their_own(database, outbox) -> None:
    for number in range(6):
        endpoint = outbox.endpoint(NOWHERE)
        if number < 4:
            outbox.execute(
                "UPDATE webhook_endpoint SET failing_since = now() - interval '2 minutes' WHERE id = :id",
                id=endpoint.id,
            )
    outbox.cancel_one()
    with unit_of_work(database) as conn:
        taken = take_due(conn, Room(healthy=10, failing=1, per_account=100))
    assert Counter(delivery.is_failing for delivery in taken) == {True: 1, False: 2}


def test_no_account_takes_all_places(database, settings, outbox) -> None:
    greedy, modest = outbox, Outbox(settings, database, "modest")
    for _ in range(8):
        greedy.endpoint(NOWHERE, max_in_flight=10)
    for _ in range(3):
        greedy.cancel_one()
    modest.endpoint(NOWHERE)
    modest.cancel_one()
    room = Room(healthy=20, failing=0, per_account=5, account_load={greedy.account_id: 2})
    with unit_of_work(database) as conn:
        taken = Counter(delivery.account_id for delivery in take_due(conn, room))
    assert taken == {greedy.account_id: 3, modest.account_id: 1}


def test_places_go_round_the_endpoints_before_one_gets_a_second(database, outbox) -> None:
    for _ in range(2):
        outbox.endpoint(NOWHERE, max_in_flight=10)
    for _ in range(5):
        outbox.cancel_one()
    with unit_of_work(database) as conn:
        taken = take_due(conn, Room(healthy=4, failing=0, per_account=100))
    assert sorted(Counter(delivery.endpoint_id for delivery in taken).values()) == [2, 2]


def test_name_servers_that_hang_hold_up_nobody_else(
    settings, database, object_store, receiver, outbox
) -> None:
    released = threading.Event()

    def resolver(host: str, port: int) -> list[str]:
        if host.startswith("hangs"):
            released.wait(120)
        return system_resolver("127.0.0.1", port)

    num_hanging = 3 * PLACES_PER_ACCOUNT
    for number in range(num_hanging):
        outbox.endpoint(f"http://hangs{number}.example:8080/")
    outbox.cancel_one()
    healthy = Outbox(settings, database, "healthy")
    healthy.endpoint(f"http://hooks.example:{receiver.port}/hook")
    with contextlib.ExitStack() as stack:
        stack.callback(released.set)
        stack.enter_context(
            sending(patient(settings), database, object_store, resolver=resolver, lookup_s=55)
        )
        wait_until(outbox.are(*["leased"] * num_hanging), "all hanging deliveries on the wire")
        healthy.cancel_one()
        wait_until(lambda: receiver.received, "the healthy endpoint's delivery")
        assert outbox.attempts()[1:] == []  # the others hang still


def test_a_sender_holds_up_no_change_of_state(database, outbox) -> None:
    outbox.endpoint(NOWHERE)
    outbox.cancel_one()
    with unit_of_work(database) as conn:
        assert take_due(conn, Room(10, 10, 10))  # its locks are held until the end of the block
        outbox.cancel_one()
        count = conn.execute(sa.text("SELECT count(*) FROM webhook_message")).scalar_one()
    assert count == 2
