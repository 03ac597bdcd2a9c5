"""Rows of the first published release (schema 0005) under today's code and schema.

They are written by plain SQL with the columns that its code named, before the upgrade (a farm that is
updated) and after it (its api and worker beside new ones in a rolling update); today's code must then serve,
finish and tell all of them.
"""

import hashlib
import hmac
import json

import pytest
from sqlalchemy import create_engine, text
from standardwebhooks import Webhook

from farm.accounts import authenticate, make_key
from farm.db import schema
from farm.db.session import unit_of_work
from farm.ids import new_id
from farm.jobs import lifecycle
from farm.jobs.job import NewAsset
from farm.jobs.lifecycle import Result
from farm.jobs.queries import ListQuery, list_jobs, timeline
from farm.jobs.states import State
from farm.jobs.video_object import video_object
from farm.outbox import relay_once
from farm.secretbox import seal
from farm.webhooks.signing import new_secret
from tests.service.driver import Driver
from tests.service.webhooks.harness import sending, wait_until
from tests.service.webhooks.receiver import Receiver

FIRST_RELEASE = "0005"
SECRET = new_secret()
PARAMS = {
    "prompt": "A red fox walks.",
    "tier": "272p",
    "num_inference_steps": 4,
    "seed": 7,
    "output_width": None,
    "output_height": None,
    "deterministic": False,
    "acceleration": "off",
    "has_image": False,
}
ACCOUNT = (
    "INSERT INTO account (id, name, limits) VALUES (:account, 'old', '{}')",
    "INSERT INTO account_usage (account_id, queued, running) VALUES (:account, 1, 1)",
    """INSERT INTO api_key (id8, account_id, name, env, hash, last4, scopes, cidrs)
       VALUES (:id8, :account, '', 'live', :hash, :last4, '{videos:read,videos:write}', '{}')""",
    """INSERT INTO webhook_endpoint (id, account_id, job_id, url, event_types)
       VALUES (:endpoint, :account, NULL, :url, '{video.completed}')""",
    "INSERT INTO webhook_secret (id, endpoint_id, ciphertext) VALUES (:secret_id, :endpoint, :sealed)",
    """INSERT INTO worker_group (id, host, profile, devices, boot_id, state, heartbeat_at)
       VALUES ('old-group', 'host', 'tiny-cpu', '', 'boot-old', 'busy', now())""",
)
QUEUED = (
    """INSERT INTO job (id, account_id, state, profile, requested_profile, priority, prompt, params,
           contract_version, wave_key, seed, steps, max_attempts, expires_in_s, exec_timeout_s, retention_s,
           notices, metadata, user_tag, rank_at, queue_deadline)
       VALUES (:id, :account, 'queued', 'tiny-cpu', 'auto', 0, 'A red fox walks.', :params,
           1, '272p/4/det=0', 7, 4, 3, 86400, 900, 604800, '[]', '{}', NULL, now(),
           now() + interval '1 day')""",
    """INSERT INTO job_event (job_id, seq, type, at, epoch, data)
       VALUES (:id, 1, 'queued', now(), 0, '{"profile": "tiny-cpu"}')""",
    """INSERT INTO outbox (topic, payload)
       VALUES ('doorbell', jsonb_build_object('job_id', CAST(:id AS text), 'profile', 'tiny-cpu'))""",
)
RUNNING = (
    """UPDATE job SET state = 'running', phase = 'denoise', step = 2, progress = 47, epoch = 1, attempts = 1,
           group_id = 'old-group', lease_until = now() + interval '30 seconds', seq = 3,
           attempt_deadline = now() + interval '900 seconds', started_at = now(), running_at = now()
       WHERE id = :id""",
    """INSERT INTO job_attempt (job_id, epoch, group_id, worker_boot_id, profile, queued_at, started_at,
           running_at) VALUES (:id, 1, 'old-group', 'boot-old', 'tiny-cpu', now(), now(), now())""",
    """INSERT INTO job_event (job_id, seq, type, at, epoch, data)
       VALUES (:id, 2, 'starting', now(), 1, '{"from": "queued", "group": "old-group"}'),
              (:id, 3, 'running', now(), 1, '{"from": "starting"}')""",
)
FINISHED = (
    """UPDATE job SET state = 'succeeded', phase = NULL, progress = 100, lease_until = NULL, seq = 5,
           attempt_deadline = NULL, uploading_at = now(), finished_at = now(), result = '{"bytes": 10}'
       WHERE id = :id""",
    """UPDATE job_attempt SET uploading_at = now(), ended_at = now(), outcome = 'succeeded',
           timings = '{"render": 2.0}', peak_memory_mb = 100 WHERE job_id = :id""",
    """INSERT INTO job_event (job_id, seq, type, at, epoch, data)
       VALUES (:id, 4, 'uploading', now(), 1, '{"from": "running"}'),
              (:id, 5, 'succeeded', now(), 1, '{"from": "uploading"}')""",
    """INSERT INTO asset (id, account_id, kind, job_id, epoch, key, bytes, sha256, media_type, expires_at)
       VALUES (:asset, :account, 'video', :id, 1, 'v1/old/video.mp4', 10, 'ab', 'video/mp4',
           now() + interval '7 days')""",
    """INSERT INTO webhook_message (id, account_id, type, job_id, seq, body, created_at)
       VALUES (:message, :account, 'video.completed', :id, 5, :body, now())""",
    """INSERT INTO webhook_delivery (id, message_id, endpoint_id, max_attempts)
       VALUES (:delivery, :message, :endpoint, 10)""",
)


@pytest.fixture
def receiver():
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def empty(new_database):
    """Return an engine on a database without tables."""
    engine = create_engine(new_database("template1").replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def to_first_release(engine):
    """Build the tables as the first release had them; downgrades are tested elsewhere."""
    schema.upgrade(engine)
    assert schema.downgrade(engine, FIRST_RELEASE).current == FIRST_RELEASE


def write_rows(engine, settings, url):
    """Write what a farm of the first release holds; return its key's text and the ids of its jobs."""
    key = make_key("live")
    pepper = settings.key_pepper.get_secret_value().encode()
    jobs = {name: new_id("video") for name in ("queued", "running", "finished")}
    message = new_id("evt")
    thin = {"id": jobs["finished"], "object": "video", "state": "succeeded", "status": "completed"}
    body = {"id": message, "object": "event", "type": "video.completed", "created_at": 1, "data": thin}
    values = {
        "account": new_id("acct"),
        "id8": key.id8,
        "hash": hmac.digest(pepper, key.secret.encode(), hashlib.sha256),
        "last4": key.text[-4:],
        "endpoint": new_id("we"),
        "url": url,
        "secret_id": new_id("whs"),
        "sealed": seal(settings.secret_key, SECRET),
        "params": json.dumps(PARAMS),
        "message": message,
        "body": json.dumps(body),
        "delivery": new_id("whd"),
        "asset": new_id("asset"),
    }
    steps = {"queued": QUEUED, "running": QUEUED + RUNNING, "finished": QUEUED + RUNNING + FINISHED}
    with engine.begin() as conn:
        for statement in ACCOUNT:
            conn.execute(text(statement), values)
        for name, job_id in jobs.items():
            for statement in steps[name]:
                conn.execute(text(statement), values | {"id": job_id})
    return key.text, jobs


def finish(driver, job_id, epoch):
    assert driver.run(lifecycle.mark_uploading, job_id, epoch)
    clip = NewAsset("video", f"v1/{job_id}/video.mp4", 10, "ab" * 32, "video/mp4", 448, 256)
    assert driver.run(lifecycle.succeed, job_id, epoch, Result({"bytes": 10}, [clip], {"render": 2.0}, 100))


@pytest.mark.parametrize("is_rolling", [False, True], ids=["updated", "old code beside new"])
def test_jobs_of_the_first_release_are_shown_finished_and_told(
    empty, settings, object_store, receiver, is_rolling
):
    if is_rolling:
        schema.upgrade(empty)
    else:
        to_first_release(empty)
    key_text, jobs = write_rows(empty, settings, receiver.url)
    assert schema.upgrade(empty).is_at_head
    with unit_of_work(empty) as conn:
        principal = authenticate(conn, key_text, settings.key_pepper)
        page = list_jobs(conn, principal.account_id, ListQuery())
        shown = {found.id: video_object(found)["state"] for found in page.jobs}
    assert shown == {jobs["queued"]: "queued", jobs["running"]: "running", jobs["finished"]: "succeeded"}

    driver = Driver(empty)
    driver.check_invariants()
    rung = []
    assert relay_once(empty, lambda job_id, _profile: rung.append(job_id)) == len(jobs)
    assert set(rung) == set(jobs.values())
    # The worker that had it goes on, with the lease that the old code wrote; a new one takes what waits.
    assert driver.run(lifecycle.beat, jobs["running"], 1, "old-group", None) is not None
    finish(driver, jobs["running"], 1)
    claimed = driver.claim()
    assert (claimed.job.id, claimed.epoch) == (jobs["queued"], 1)
    assert driver.run(lifecycle.mark_running, jobs["queued"], 1)
    finish(driver, jobs["queued"], 1)

    driver.check_invariants()
    with sending(settings, empty, object_store):
        wait_until(
            lambda: driver.sql("SELECT 1 FROM webhook_delivery WHERE status <> 'ok'") == [], "delivery"
        )
    told = [Webhook(SECRET).verify(got.body, got.headers) for got in receiver.received]
    assert {body["data"]["id"] for body in told} == set(jobs.values())
    with unit_of_work(empty) as conn:
        for job_id in jobs.values():
            history = timeline(conn, principal.account_id, job_id)
            assert [event.seq for event in history.events] == [1, 2, 3, 4, 5]
            assert [attempt.outcome for attempt in history.attempts] == [State.SUCCEEDED]
    assert driver.usage(principal.account_id) == (0, 0)


COLUMNS = """
    SELECT table_name || '.' || column_name, table_name, udt_name, is_nullable = 'YES' AS may_be_null,
           column_default IS NOT NULL OR is_identity = 'YES' OR is_nullable = 'YES' AS may_be_left_out
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'
"""


def test_later_revisions_only_expand_what_the_first_release_writes(empty):
    def columns():
        with empty.connect() as conn:
            return {name: tuple(rest) for name, *rest in conn.execute(text(COLUMNS))}

    schema.upgrade(empty)
    now = columns()
    schema.downgrade(empty, FIRST_RELEASE)
    before = columns()
    old_tables = {table for table, *_ in before.values()}
    assert {name: now.get(name) for name in before} == before  # neither gone, nor renamed, nor narrowed
    added = {name: rest for name, rest in now.items() if name not in before and rest[0] in old_tables}
    assert len(added) > 5
    assert [name for name, (*_, may_be_left_out) in added.items() if not may_be_left_out] == []
