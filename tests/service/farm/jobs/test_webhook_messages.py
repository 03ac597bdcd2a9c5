"""Messages are written with the state change itself, for exactly those who subscribed."""

import pytest

from farm.jobs import lifecycle
from farm.jobs.control import delete_job
from farm.jobs.states import State
from farm.webhooks.messages import DEFAULT_EVENT_TYPES, EVENT_TYPES


def add_endpoint(driver, event_types, *, account=None, enabled=True, name="we_1"):
    driver.sql(
        "INSERT INTO webhook_endpoint (id, account_id, url, event_types, enabled)"
        " VALUES (:id, :account, 'https://hooks.example/in', :types, :enabled)",
        id=name,
        account=account or driver.account,
        types=list(event_types),
        enabled=enabled,
    )


def messages(driver):
    return [row.type for row in driver.sql("SELECT type FROM webhook_message ORDER BY seq")]


@pytest.mark.req("F-31")
def test_whoever_asks_for_everything_hears_of_every_state_with_a_type(driver):
    add_endpoint(driver, EVENT_TYPES)
    job = driver.reach(State.SUCCEEDED)
    driver.run(delete_job, driver.account, job.id, "user")
    assert messages(driver) == ["video.queued", "video.started", "video.completed", "video.deleted"]
    driver.check_invariants()


@pytest.mark.req("F-31")
@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (State.SUCCEEDED, "video.completed"),
        (State.FAILED, "video.failed"),
        (State.CANCELED, "video.canceled"),
        (State.EXPIRED, "video.expired"),
    ],
)
def test_the_default_subscription_hears_of_the_end_only(driver, end, kind):
    add_endpoint(driver, DEFAULT_EVENT_TYPES)
    job = driver.reach(end)
    (row,) = driver.sql("SELECT * FROM webhook_message")
    assert (row.type, row.job_id, row.seq, row.created_at) == (kind, job.id, job.seq, job.finished_at)
    assert (row.body["id"], row.body["data"]["id"], row.body["data"]["state"]) == (row.id, job.id, end)
    assert row.body["data"]["error"] == job.error


@pytest.mark.req("F-31")
def test_a_state_change_that_is_rolled_back_sends_nothing(driver):
    add_endpoint(driver, EVENT_TYPES)
    job = driver.reach(State.UPLOADING)
    before = messages(driver)

    def fail_late(conn):
        lifecycle.release(conn, job.id, 1)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        driver.run(fail_late)
    assert messages(driver) == before


def test_one_message_goes_to_all_endpoints_that_subscribed(driver):
    add_endpoint(driver, ["video.completed"], name="we_1")
    add_endpoint(driver, ["video.completed", "video.failed"], name="we_2")
    add_endpoint(driver, ["video.failed"], name="we_3")
    driver.reach(State.SUCCEEDED)
    rows = driver.sql("SELECT message_id, endpoint_id, status FROM webhook_delivery ORDER BY endpoint_id")
    assert [(row.endpoint_id, row.status) for row in rows] == [("we_1", "pending"), ("we_2", "pending")]
    assert len({row.message_id for row in rows}) == 1


def test_disabled_endpoints_and_other_accounts_hear_nothing(driver):
    add_endpoint(driver, EVENT_TYPES, enabled=False)
    add_endpoint(driver, EVENT_TYPES, account=driver.new_account(), name="we_2")
    driver.reach(State.SUCCEEDED)
    assert messages(driver) == []


def test_a_requeue_is_told_as_queued_again(driver):
    add_endpoint(driver, EVENT_TYPES)
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.release, job.id, 1)
    assert messages(driver) == ["video.queued", "video.started", "video.queued"]
