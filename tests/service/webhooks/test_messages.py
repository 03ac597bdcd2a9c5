"""What is written to be told: progress for those who ask, whole objects that fit, and what is removed."""

import json

import pytest

from farm.db.session import unit_of_work
from farm.jobs import lifecycle
from farm.jobs.control import delete_job
from farm.jobs.phases import Progress
from farm.jobs.states import State
from farm.webhooks.deliveries import Outcome, Room, record, take_due
from farm.webhooks.delivery_log import purge_old
from farm.webhooks.endpoints import NewEndpoint, create_endpoint, delete_endpoint
from farm.webhooks.messages import DEFAULT_EVENT_TYPES, EVENT_TYPES, MAX_BODY_BYTES
from tests.service.driver import GROUP, REQUEST, Driver

URL = "https://hooks.example/in"
ROOM = Room(100, 100, 100)


@pytest.fixture
def driver(database) -> Driver:
    return Driver(database)


def subscribe(driver: Driver, *event_types: str, **options) -> str:
    new = NewEndpoint(url=URL, event_types=event_types or DEFAULT_EVENT_TYPES, **options)
    return driver.run(create_endpoint, driver.account, new, {}).id


def beat(driver: Driver, job_id: str, step: int) -> None:
    assert driver.run(lifecycle.beat, job_id, 1, GROUP, Progress("denoise", step, 4))


def pass_seconds(driver: Driver, seconds: int) -> None:
    driver.sql("UPDATE webhook_message SET created_at = created_at - make_interval(secs => :s)", s=seconds)


def progress_messages(driver: Driver) -> list:
    return driver.sql("SELECT * FROM webhook_message WHERE type = 'video.progress' ORDER BY id")


def test_progress_is_told_at_most_every_ten_seconds_to_those_who_asked(driver) -> None:
    subscribe(driver, "video.progress")
    subscribe(driver)
    job = driver.reach(State.RUNNING)
    for step in (1, 2):
        beat(driver, job.id, step)
    pass_seconds(driver, 9)
    beat(driver, job.id, 3)
    assert len(progress_messages(driver)) == 1
    pass_seconds(driver, 1)
    beat(driver, job.id, 4)
    first, second = progress_messages(driver)
    told = second.body["data"]
    assert (told["step"], told["total_steps"], told["phase"]) == (4, 4, "denoise")
    assert told["progress"] > first.body["data"]["progress"]
    assert driver.sql("SELECT count(*) FROM webhook_delivery")[0].count == 2
    driver.check_invariants()


def test_progress_that_nobody_asked_for_is_not_written(driver) -> None:
    subscribe(driver)
    beat(driver, driver.reach(State.RUNNING).id, 1)
    assert progress_messages(driver) == []


def test_newer_progress_takes_the_place_of_what_still_waits(driver) -> None:
    subscribe(driver, "video.progress")
    job = driver.reach(State.RUNNING)
    beat(driver, job.id, 1)
    pass_seconds(driver, 10)
    beat(driver, job.id, 2)
    rows = driver.sql("SELECT status FROM webhook_delivery ORDER BY id")
    assert [row.status for row in rows] == ["canceled", "pending"]


def test_progress_is_tried_twice_at_most(driver) -> None:
    subscribe(driver, "video.progress")
    beat(driver, driver.reach(State.RUNNING).id, 1)
    statuses = []
    for _ in range(2):
        driver.sql("UPDATE webhook_delivery SET next_attempt_at = now()")
        with unit_of_work(driver.engine) as conn:
            record(conn, [(taken, Outcome(1, error="timeout")) for taken in take_due(conn, ROOM)])
        statuses.append(driver.sql("SELECT status FROM webhook_delivery")[0].status)
    assert statuses == ["pending", "dead"]


def test_the_whole_object_is_kept_only_where_somebody_asked_for_it(driver) -> None:
    thin = subscribe(driver)
    driver.reach(State.CANCELED)
    assert driver.sql("SELECT full_data FROM webhook_message")[0].full_data is None
    full = subscribe(driver, payload_mode="full")
    driver.reach(State.CANCELED)
    with unit_of_work(driver.engine) as conn:
        bodies = {delivery.endpoint_id: delivery.body for delivery in take_due(conn, ROOM)}
    assert "prompt" not in bodies[thin]["data"]
    assert bodies[full]["data"]["prompt"] == REQUEST.prompt
    assert (bodies[full]["data"]["state"], bodies[full]["type"]) == ("canceled", "video.canceled")


@pytest.mark.parametrize(
    ("prompt", "metadata", "flags"),
    [
        ("x" * 60_000, {}, {"is_prompt_truncated"}),
        ("\N{SNOWMAN}" * 20_000, {"a": "b"}, {"is_prompt_truncated"}),
        (
            "a fox",
            {f"{number:064}": "\N{SNOWMAN}" * 512 for number in range(16)},
            {"is_prompt_truncated", "is_metadata_omitted"},
        ),
    ],
    ids=["long", "wide", "metadata"],
)
def test_a_whole_object_is_cut_to_what_a_receiver_is_promised_and_says_so(
    driver, prompt, metadata, flags
) -> None:
    subscribe(driver, payload_mode="full")
    request = REQUEST.__class__.from_json({**REQUEST.to_json(), "prompt": prompt})
    driver.reach(State.CANCELED, request=request, metadata=metadata)
    data = driver.sql("SELECT full_data FROM webhook_message")[0].full_data
    assert len(json.dumps(data, ensure_ascii=False).encode()) <= MAX_BODY_BYTES
    assert {name for name in data if name.startswith("is_")} == flags


def test_a_deletion_never_shows_the_object_again(driver) -> None:
    subscribe(driver, *EVENT_TYPES, payload_mode="full")
    job = driver.reach(State.CANCELED)
    driver.run(delete_job, driver.account, job.id, "user")
    (row,) = driver.sql("SELECT body, full_data FROM webhook_message WHERE type = 'video.deleted'")
    assert row.full_data is None
    assert "prompt" not in row.body["data"]


def test_messages_and_deleted_endpoints_are_removed_after_thirty_days(driver) -> None:
    gone = subscribe(driver)
    kept = subscribe(driver)
    driver.reach(State.CANCELED)
    driver.run(delete_endpoint, driver.account, gone)
    assert driver.run(purge_old) == 0
    driver.sql("UPDATE webhook_message SET created_at = now() - interval '31 days'")
    driver.sql("UPDATE webhook_endpoint SET deleted_at = now() - interval '31 days' WHERE id = :id", id=gone)
    driver.reach(State.CANCELED)
    assert driver.run(purge_old) == 1
    assert driver.sql("SELECT count(*) FROM webhook_delivery")[0].count == 1
    assert [row.id for row in driver.sql("SELECT id FROM webhook_endpoint")] == [kept]
