"""Submit is one transaction: all of it or nothing, and never more than the quota."""

from datetime import timedelta

import psycopg
import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from farm.db.session import unit_of_work
from farm.errors import NotFoundError, QueueFullError
from farm.jobs.job import NewAsset, Rules
from farm.jobs.states import State
from farm.jobs.submit import JobWebhook, submit
from farm.outbox import CHANNEL
from tests.job_rows import REQUEST
from tests.service.driver import in_threads

IMAGE = NewAsset("input", "v1/a/in/aa.png", 5, "aa" * 32, "image/png", 640, 480)
HOOK = JobWebhook("https://hooks.example/in", ["video.queued", "video.completed"], b"sealed")


def test_the_row_holds_the_whole_request_and_what_it_was_given(driver):
    driver.register()
    job = driver.submit(
        priority=3, expires_in_s=600, max_attempts=2, metadata={"a": "b"}, user_tag="u", notices=["n"]
    )
    assert (job.state, job.epoch, job.seq, job.attempts) == (State.QUEUED, 0, 1, 0)
    assert job.params == REQUEST.to_json()
    assert (job.prompt, job.seed, job.steps, job.wave_key) == (REQUEST.prompt, 7, 4, "272p/4/det=0")
    assert (job.metadata, job.user_tag, job.notices) == ({"a": "b"}, "u", ["n"])
    assert (job.max_attempts, job.exec_timeout_s, job.retention_s) == (2, 900, 604_800)
    assert job.queue_deadline - job.queued_at == timedelta(seconds=600)


@pytest.mark.parametrize("priority", [-10, 0, 10])
def test_a_point_of_priority_is_ten_minutes_head_start(driver, priority):
    job = driver.submit(priority=priority)
    assert job.queued_at - job.rank_at == timedelta(minutes=10 * priority)


@pytest.mark.req("F-40")
def test_an_aborted_submit_leaves_nothing_behind(driver):
    before = driver.everything()

    def submit_and_fail(conn):
        submit(conn, driver.submission(input=IMAGE, webhook=HOOK))
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        driver.run(submit_and_fail)
    assert driver.everything() == before
    assert driver.sql("SELECT id FROM webhook_endpoint") == []


@pytest.mark.req("F-40")
def test_the_relay_is_woken_at_the_commit_and_not_before(driver, settings):
    url = settings.database_url.replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute(f"LISTEN {CHANNEL}")
        with unit_of_work(driver.engine) as conn:
            submit(conn, driver.submission())
            assert list(listener.notifies(timeout=0.2)) == []
        assert len(list(listener.notifies(timeout=60, stop_after=1))) == 1


def test_the_doorbell_names_job_and_profile_and_nothing_else(driver):
    job = driver.submit()
    (row,) = driver.sql("SELECT topic, payload, sent_at FROM outbox")
    assert (row.topic, row.payload, row.sent_at) == (
        "doorbell",
        {"job_id": job.id, "profile": "tiny-cpu"},
        None,
    )


@pytest.mark.req("F-12")
def test_the_queue_takes_exactly_its_limit_also_of_submits_at_the_same_time(driver):
    driver.rules = Rules(max_queued=5)

    def try_submit():
        while True:
            try:
                return driver.submit()
            except QueueFullError as refused:
                return refused
            except (OperationalError, PoolTimeoutError):
                # Submits of one account wait for each other, on a slow machine longer than a lock is
                # waited for: the api answers 503 then, and the client comes again.
                continue

    answers = in_threads([try_submit] * 12)
    refusals = [answer for answer in answers if isinstance(answer, QueueFullError)]
    assert len(refusals) == 7
    assert (refusals[0].code, refusals[0].http_status) == ("queue_full", 429)
    assert refusals[0].retry_after_s >= 1
    assert driver.usage() == (5, 0)
    driver.check_invariants()


@pytest.mark.req("F-12")
def test_a_refused_submit_leaves_nothing_behind(driver):
    driver.rules = Rules(max_queued=1)
    driver.submit()
    before = driver.everything()
    with pytest.raises(QueueFullError):
        driver.submit(input=IMAGE, webhook=HOOK)
    assert driver.everything() == before


@pytest.mark.req("F-12")
def test_an_account_may_have_a_limit_of_its_own(driver):
    account = driver.new_account(max_queued=2)
    driver.submit(account)
    driver.submit(account)
    with pytest.raises(QueueFullError, match="2 jobs are waiting"):
        driver.submit(account)


@pytest.mark.req("F-12")
def test_a_full_account_does_not_hold_up_another(driver):
    driver.rules = Rules(max_queued=1)
    other = driver.new_account()
    driver.submit()
    assert driver.submit(other).account_id == other


@pytest.mark.req("F-12")
def test_running_jobs_do_not_count_as_queued(driver):
    driver.rules = Rules(max_queued=1)
    driver.submit()
    driver.claim()
    driver.submit()
    assert driver.usage() == (1, 1)


@pytest.mark.parametrize("account", ["acct_unknown", "suspended"])
def test_an_account_that_may_not_submit_is_not_found(driver, account):
    if account == "suspended":
        account = driver.new_account()
        driver.sql("UPDATE account SET status = 'suspended' WHERE id = :id", id=account)
    with pytest.raises(NotFoundError):
        driver.submit(account)


def test_the_same_image_is_one_row_within_an_account(driver):
    first, second = driver.submit(input=IMAGE), driver.submit(input=IMAGE)
    assert first.input_asset_id == second.input_asset_id
    assert driver.sql("SELECT count(*) FROM asset")[0][0] == 1


def test_accounts_do_not_share_images(driver):
    mine, theirs = driver.submit(input=IMAGE), driver.submit(driver.new_account(), input=IMAGE)
    assert mine.input_asset_id != theirs.input_asset_id


def test_an_image_whose_object_is_gone_gets_a_new_row(driver):
    first = driver.submit(input=IMAGE)
    driver.sql("UPDATE asset SET deleted_at = now()")
    assert driver.submit(input=IMAGE).input_asset_id != first.input_asset_id


@pytest.mark.req("F-31")
def test_the_endpoint_of_a_job_hears_of_its_first_event(driver):
    job = driver.submit(webhook=HOOK)
    (row,) = driver.sql(
        "SELECT m.type, m.seq, m.job_id, d.status, e.url, e.job_id AS owner, s.ciphertext, s.kind"
        " FROM webhook_message m JOIN webhook_delivery d ON d.message_id = m.id"
        " JOIN webhook_endpoint e ON e.id = d.endpoint_id JOIN webhook_secret s ON s.endpoint_id = e.id"
    )
    assert (row.type, row.seq, row.job_id, row.status) == ("video.queued", 1, job.id, "pending")
    assert (row.url, row.owner, bytes(row.ciphertext), row.kind) == (HOOK.url, job.id, b"sealed", "hmac")


def test_the_endpoint_of_a_job_does_not_hear_of_others(driver):
    driver.submit(webhook=HOOK)
    driver.submit()
    assert driver.sql("SELECT count(*) FROM webhook_message")[0][0] == 1
