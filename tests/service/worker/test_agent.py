"""The agent without Celery: from a queued row to public objects, and every way to end early."""

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import psycopg
import pytest
import redis
import sqlalchemy
from PIL import Image

from farm.db import tables
from farm.db.session import unit_of_work
from farm.errors import AlreadyFinishedError
from farm.jobs.job import NewAsset
from farm.jobs.states import State
from farm.progress import progress_key
from farm.storage import input_key
from tests.service.worker.harness import QUICK, chaos, wait_until
from worker import attempt
from worker.agent import AgentError
from worker.liveness import StallLimits

LONG = {"steps": 200, "step_s": 0.15}


def submit_long(bench, **script):
    """Queue a job that takes half a minute if nobody stops it."""
    return bench.submit(chaos(step_s=LONG["step_s"], **script), steps=LONG["steps"])


def stored_keys(s3):
    listing = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=s3.prefix)
    return {entry["Key"].removeprefix(f"{s3.prefix}/") for entry in listing.get("Contents", [])}


@pytest.mark.req("F-20")
def test_queued_job_becomes_three_public_objects(bench, start_agent, object_store, s3):
    agent = start_agent()
    job = bench.submit()
    done = bench.wait(job, State.SUCCEEDED, State.FAILED)
    assert (done.state, done.progress, done.error) == (State.SUCCEEDED, 100, None)
    assert bench.event_types(job) == ["queued", "starting", "running", "uploading", "succeeded"]
    assets = bench.assets(job)
    assert set(assets) == {"video", "thumb", "sprite", "audio", "meta"}
    assert {asset.key for asset in assets.values()} == stored_keys(s3)
    for asset in assets.values():
        body = object_store.open_range(asset.key).read()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (asset.bytes, asset.sha256)
        assert "/e1/" in asset.key
    assert done.result["sha256"] == assets["video"].sha256
    assert done.group_id == agent.agent.group_id


def test_sidecar_tells_how_to_make_the_clip_again(bench, start_agent, object_store):
    start_agent()
    job = bench.submit("A paper boat on a pond.")
    bench.wait(job, State.SUCCEEDED)
    meta = json.loads(object_store.open_range(bench.assets(job)["meta"].key).read())
    assert meta["request"] == bench.job(job.id).params
    assert (meta["id"], meta["epoch"], meta["seed"]) == (job.id, 1, 7)
    assert meta["engine"]["engine"] == "chaos"
    assert meta["sha256"] == bench.assets(job)["video"].sha256
    assert set(meta["timings"]) >= {"render", "check"}


def test_clips_follow_one_another_on_the_same_ranks(bench, start_agent):
    agent = start_agent()
    pids = agent.pids
    jobs = [bench.submit() for _ in range(3)]
    for job in jobs:
        bench.wait(job, State.SUCCEEDED)
    assert agent.pids == pids


def put_image(bench, object_store):
    file = BytesIO()
    Image.new("RGB", (64, 48), "teal").save(file, "PNG")
    body = file.getvalue()
    key = input_key(bench.account_id, hashlib.sha256(body).hexdigest())
    stored = object_store.put(key, body, "image/png")
    return NewAsset("input", key, stored.bytes, stored.sha256, "image/png", width=64, height=48)


def test_input_image_is_fetched_by_its_key(bench, start_agent, object_store):
    start_agent()
    job = bench.submit(image=put_image(bench, object_store))
    assert bench.wait(job, State.SUCCEEDED, State.FAILED).state == State.SUCCEEDED


def test_input_image_that_is_gone_is_a_permanent_failure(bench, start_agent, object_store):
    image = put_image(bench, object_store)
    object_store.delete(image.key)
    start_agent()
    job = bench.submit(image=image)
    failed = bench.wait(job, State.FAILED)
    assert failed.error["code"] == "invalid_input"
    assert "no longer stored" in failed.error["message"]
    assert failed.attempts == 1


def test_progress_reaches_the_row_and_live_listeners(bench, start_agent, redis_url):
    start_agent()
    job = submit_long(bench)
    running = bench.wait_for_step(job, 3)
    assert 5 <= running.progress <= 90
    with redis.Redis.from_url(redis_url) as client:

        def is_denoising():
            report = client.get(progress_key(job.id))
            return report is not None and json.loads(report)["phase"] == "denoise"

        wait_until(is_denoising, "the live report catching up")
        assert 0 < client.ttl(progress_key(job.id)) <= 600
        bench.cancel(job)
        bench.wait(job, State.CANCELED)
        wait_until(lambda: client.get(progress_key(job.id)) is None, "the live report being forgotten")


def test_cancel_stops_the_ranks_at_a_step_and_keeps_them_warm(bench, start_agent, s3):
    agent = start_agent()
    pids = agent.pids
    job = submit_long(bench)
    bench.wait_for_step(job)
    bench.cancel(job)
    assert bench.wait(job, State.CANCELED, State.SUCCEEDED).state == State.CANCELED
    following = bench.submit()
    bench.wait(following, State.SUCCEEDED)
    assert agent.pids == pids
    assert all(job.id not in key for key in stored_keys(s3))


def test_ranks_that_ignore_a_cancel_are_killed(bench, start_agent):
    agent = start_agent(times=replace(QUICK, cancel_grace_s=0.3))
    pids = agent.pids
    job = submit_long(bench, ignore_stop=True)
    bench.wait_for_step(job)
    bench.cancel(job)
    bench.wait(job, State.CANCELED)
    wait_until(lambda: agent.agent.group.is_ready, "the group being back")
    assert not set(pids) & set(agent.pids)


@pytest.mark.req("F-05")
def test_cancel_that_comes_before_the_success_wins(bench, start_agent, monkeypatch):
    agent = start_agent()
    store = agent.agent._tools.store
    put = store.put

    def cancel_and_put(key, source, media_type):
        if key.endswith("meta.json"):
            bench.cancel(job)
        return put(key, source, media_type)

    monkeypatch.setattr(store, "put", cancel_and_put)
    job = bench.submit()
    canceled = bench.wait(job, State.CANCELED, State.SUCCEEDED)
    assert canceled.state == State.CANCELED
    assert bench.assets(job) == {}
    assert canceled.result is None


@pytest.mark.req("F-05")
def test_cancel_that_comes_after_the_success_is_too_late(bench, start_agent):
    start_agent()
    job = bench.submit()
    bench.wait(job, State.SUCCEEDED)
    with pytest.raises(AlreadyFinishedError):
        bench.cancel(job)
    assert bench.job(job.id).state == State.SUCCEEDED


@pytest.mark.req("F-15")
def test_prompt_with_too_many_tokens_fails_once_and_for_all(bench, start_agent):
    agent = start_agent()
    pids = agent.pids
    job = bench.submit(chaos(do="invalid_input"))
    failed = bench.wait(job, State.FAILED)
    assert failed.error["code"] == "invalid_input"
    assert "7001 tokens" in failed.error["message"]
    assert (failed.attempts, failed.running_at) == (1, None)
    assert agent.pids == pids


def test_request_above_the_caps_of_today_is_refused_before_any_rank_works(bench, start_agent):
    job = bench.submit()
    with unit_of_work(bench.database) as conn:
        params = {**job.params, "num_inference_steps": 201}
        conn.execute(sqlalchemy.update(tables.job).where(tables.job.c.id == job.id).values(params=params))
    start_agent()
    failed = bench.wait(job, State.FAILED)
    assert (failed.error["code"], failed.running_at) == ("invalid_input", None)
    assert "from 1 to 200" in failed.error["message"]


def test_engine_error_is_tried_once_more_and_then_final(bench, start_agent):
    agent = start_agent()
    pids = agent.pids
    job = bench.submit(chaos(do="engine_error"))
    failed = bench.wait(job, State.FAILED)
    assert (failed.error["code"], failed.attempts) == ("engine_error", 2)
    assert "not finite" in bench.attempts(job)[0].error["detail"]["error"]
    assert "not finite" not in json.dumps(failed.error)
    assert agent.pids == pids


def test_out_of_memory_restarts_the_ranks(bench, start_agent):
    agent = start_agent()
    pids = agent.pids
    job = bench.submit(chaos(do="out_of_memory"))
    failed = bench.wait(job, State.FAILED)
    assert failed.error["code"] == "out_of_memory"
    wait_until(lambda: agent.agent.group.is_ready, "the group being back")
    assert not set(pids) & set(agent.pids)


@pytest.mark.req("F-23")
@pytest.mark.parametrize("file", ["wrong_size", "wrong_frames", "truncated", "missing"])
def test_file_that_breaks_the_contract_is_no_success(bench, start_agent, s3, file):
    start_agent()
    job = bench.submit(chaos(file=file), max_attempts=1)
    failed = bench.wait(job, State.FAILED)
    assert failed.error["code"] == "engine_error"
    assert bench.attempts(job)[0].error["detail"]["kind"] == "self_check"
    assert stored_keys(s3) == set()
    assert "uploading" not in bench.event_types(job)


def test_killed_rank_brings_the_whole_group_back_and_the_job_ends_once(bench, start_agent):
    agent = start_agent(devices=2)
    pids = agent.pids
    job = bench.submit(chaos(do="sigkill", at=2, rank=1, epochs=[1]))
    done = bench.wait(job, State.SUCCEEDED, State.FAILED)
    assert (done.state, done.epoch, done.crash_count) == (State.SUCCEEDED, 2, 1)
    assert [attempt.outcome for attempt in bench.attempts(job)] == ["requeued", "succeeded"]
    assert not set(pids) & set(agent.pids)


def test_crash_leaves_evidence_for_operators_only(bench, start_agent):
    start_agent()
    job = bench.submit(chaos(do="crash"), max_attempts=1)
    failed = bench.wait(job, State.FAILED)
    assert failed.error["code"] == "worker_crashed"
    detail = bench.attempts(job)[0].error["detail"]
    assert (detail["exit_code"], detail["rank"], detail["phase"]) == (70, 0, "denoise")
    assert "a defect of the engine" in detail["traceback"]
    assert any("a defect of the engine" in line for line in detail["log"]["0"])
    assert "defect" not in json.dumps(failed.error)


@pytest.mark.req("F-46")
def test_job_that_kills_its_group_again_and_again_is_given_up(bench, start_agent):
    agent = start_agent()
    job = bench.submit(chaos(do="exit"), max_attempts=5)
    failed = bench.wait(job, State.FAILED)
    assert (failed.error["code"], failed.crash_count) == ("poison_job", 3)
    following = bench.submit()
    bench.wait(following, State.SUCCEEDED)
    assert agent.failure is None


def test_frozen_rank_loses_its_lease_under_a_healthy_agent(bench, start_agent):
    stall = StallLimits(load_s=30, first_step_s=3, step_s=3, other_s=20)
    agent = start_agent(times=replace(QUICK, stall=stall))
    pids = agent.pids
    job = bench.submit(chaos(do="freeze", at=2, epochs=[1]))
    done = bench.wait(job, State.SUCCEEDED, State.FAILED)
    assert (done.state, done.epoch) == (State.SUCCEEDED, 2)
    assert (done.infra_losses, done.crash_count) == (1, 0)
    assert not set(pids) & set(agent.pids)


@pytest.mark.req("F-02")
def test_agent_whose_job_was_taken_over_uploads_nothing(bench, start_agent, s3):
    agent = start_agent()
    job = submit_long(bench)
    bench.wait_for_step(job)
    bench.take_over(job, "group_of_another_agent")
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "ready", "the agent letting go")
    now = bench.job(job.id)
    assert (now.state, now.epoch, now.group_id) == (State.STARTING, 2, "group_of_another_agent")
    assert bench.assets(job) == {}
    assert stored_keys(s3) == set()


def test_answers_that_are_lost_after_the_commit_cost_no_render(bench, start_agent, monkeypatch):
    acts = []

    @contextmanager
    def losing_every_first_answer(database):
        with unit_of_work(database) as conn:
            yield conn
        acts.append("committed")
        if len(acts) % 2:
            raise sqlalchemy.exc.OperationalError("COMMIT", None, ConnectionError("server closed"))

    monkeypatch.setattr(attempt, "unit_of_work", losing_every_first_answer)
    monkeypatch.setattr(attempt, "WRITE_WAIT_S", 0.01)
    start_agent()
    for _ in range(2):
        job = bench.wait(bench.submit(), State.SUCCEEDED, State.FAILED)
        assert (job.state, job.epoch) == (State.SUCCEEDED, 1)
        assert bench.event_types(job) == ["queued", "starting", "running", "uploading", "succeeded"]
    assert len(acts) > 6


@pytest.mark.req("F-20")
def test_upload_that_outlasts_the_lease_is_garbage_that_nobody_sees(bench, start_agent, s3, monkeypatch):
    agent = start_agent()
    store = agent.agent._tools.store
    put = store.put

    def slow_put(key, source, media_type):
        if key.endswith("video.mp4"):
            bench.take_over(job, "group_of_another_agent")
        return put(key, source, media_type)

    monkeypatch.setattr(store, "put", slow_put)
    job = bench.submit()
    wait_until(lambda: bench.job(job.id).epoch == 2, "the takeover in mid-upload")
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "ready", "the agent letting go")
    now = bench.job(job.id)
    assert (now.state, now.group_id, now.result) == (State.STARTING, "group_of_another_agent", None)
    assert bench.assets(job) == {}
    assert all("/e1/" in key for key in stored_keys(s3))


@pytest.fixture
def outage(postgres, settings):
    """Return a function that closes the test's database to everybody, and one that opens it again."""
    name = settings.database_url.rpartition("/")[2]
    with psycopg.connect(postgres.url_of("postgres"), autocommit=True) as admin:

        def cut():
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])

        def begin():
            admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
            cut()

        def end():
            admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS true")

        yield SimpleNamespace(cut=cut, begin=begin, end=end)
        end()


def test_cut_connections_do_not_stop_a_render(bench, start_agent, outage):
    start_agent()
    job = bench.submit(chaos(step_s=0.05), steps=40)
    bench.wait_for_step(job)
    outage.cut()
    done = bench.wait(job, State.SUCCEEDED, State.FAILED)
    assert (done.state, done.epoch) == (State.SUCCEEDED, 1)


def test_database_that_stays_away_ends_the_render_with_the_lease(bench, start_agent, outage):
    agent = start_agent()
    pids = agent.pids
    job = bench.submit(chaos(step_s=0.2), steps=150)
    bench.wait_for_step(job)
    (lease,) = agent.agent._heartbeat._leases
    outage.begin()
    wait_until(lambda: lease.lost, "the lease being over")
    wait_until(lambda: not agent.agent._is_busy, "the agent letting go")
    outage.end()
    wait_until(lambda: bench.sweep() or bench.job(job.id).epoch == 2, "the second attempt")
    assert bench.job(job.id).infra_losses == 1
    assert agent.pids == pids
    bench.cancel(job)
    bench.wait(job, State.CANCELED)


def test_defect_of_the_agent_ends_it_with_a_reason(start_agent, monkeypatch):
    agent = start_agent()

    def defect():
        raise LookupError("nobody thought of this")

    monkeypatch.setattr(agent.agent, "_take_job", defect)
    agent.thread.join(60)
    assert "broke on LookupError" in str(agent.failure)
    assert agent.pids == []


def test_agent_without_its_heartbeat_does_not_go_on(start_agent, monkeypatch):
    agent = start_agent()

    def defect():
        raise LookupError("nobody thought of this either")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(agent.agent._heartbeat, "_beat", defect)
    agent.thread.join(60)
    assert "heartbeat thread has died" in str(agent.failure)


def test_attempt_that_takes_too_long_fails_for_good(bench, start_agent):
    start_agent()
    job = bench.submit(chaos(step_s=0.05), steps=100, exec_timeout_s=1)
    failed = bench.wait(job, State.FAILED, State.SUCCEEDED)
    assert failed.error["code"] == "deadline_exceeded"


def test_store_that_refuses_is_tried_again_and_then_reported(bench, start_agent, monkeypatch):
    monkeypatch.setattr(attempt, "STORE_WAIT_S", 0.01)
    agent = start_agent()
    agent.agent._tools.store._bucket = "no-such-bucket"
    job = bench.submit()
    failed = bench.wait(job, State.FAILED)
    assert failed.error["code"] == "upload_failed"
    assert failed.upload_failures >= 2
    assert bench.assets(job) == {}


def test_drain_finishes_the_current_job_and_takes_no_other(bench, start_agent):
    agent = start_agent()
    job = bench.submit(chaos(step_s=0.05), steps=20)
    bench.wait_for_step(job)
    agent.agent.drain()
    waiting = bench.submit()  # after the order: the job may have ended meanwhile
    agent.thread.join(60)
    assert bench.job(job.id).state == State.SUCCEEDED
    assert bench.job(waiting.id).state == State.QUEUED
    assert bench.group_state(agent.agent.group_id) == "gone"


def test_second_order_to_drain_gives_the_job_back_at_once(bench, start_agent):
    agent = start_agent()
    job = submit_long(bench)
    bench.wait_for_step(job)
    agent.agent.drain()
    agent.stop(now=True)
    back = bench.job(job.id)
    assert (back.state, back.preemptions, back.attempts_used) == (State.QUEUED, 1, 0)
    assert back.rank_at == job.rank_at


@pytest.fixture
def short_grace(farm_environment):
    farm_environment["FARM_WORKER__DRAIN_GRACE_S"] = "0.2"


@pytest.mark.usefixtures("short_grace")
def test_drain_that_outlasts_its_grace_gives_the_job_back(bench, start_agent):
    agent = start_agent()
    job = submit_long(bench)
    bench.wait_for_step(job)
    agent.stop(now=False)
    assert (bench.job(job.id).state, bench.job(job.id).preemptions) == (State.QUEUED, 1)


@pytest.fixture
def no_grace_for_signals(farm_environment):
    farm_environment["FARM_WORKER__STOP_GRACE_S"] = "0"


@pytest.mark.usefixtures("no_grace_for_signals")
def test_a_signal_may_have_less_grace_than_an_operators_drain(bench, start_agent):
    agent = start_agent()
    job = bench.submit(chaos(step_s=0.05), steps=20)
    bench.wait_for_step(job)
    bench.wish(agent.agent.group_id, "draining")
    agent.thread.join(60)
    finished = bench.job(job.id)
    assert (finished.state, finished.preemptions) == (State.SUCCEEDED, 0)
    bench.wish(agent.agent.group_id, None)
    again = start_agent()
    job = submit_long(bench)
    bench.wait_for_step(job)
    again.stop(now=False)
    assert (bench.job(job.id).state, bench.job(job.id).preemptions) == (State.QUEUED, 1)


def test_cancel_works_while_draining(bench, start_agent):
    agent = start_agent()
    job = submit_long(bench)
    bench.wait_for_step(job)
    agent.agent.drain()
    bench.cancel(job)
    agent.thread.join(60)
    assert bench.job(job.id).state == State.CANCELED


def test_operator_can_pause_and_drain_a_group(bench, start_agent):
    agent = start_agent()
    group_id = agent.agent.group_id
    bench.wish(group_id, "paused")
    wait_until(lambda: bench.group_state(group_id) == "paused", "the group being paused")
    job = bench.submit()
    agent.agent.ring(job.id, job.profile)
    bench.wish(group_id, None)
    bench.wait(job, State.SUCCEEDED)
    assert bench.job(job.id).started_at is not None
    bench.wish(group_id, "draining")
    agent.thread.join(60)
    assert bench.group_state(group_id) == "gone"


def loading_script(tmp_path, environment, **script):
    path = tmp_path / "loading"
    path.write_text(chaos(**script))
    return {**environment, "MAGI2_CKPT_ROOT": str(path)}


def test_group_that_cannot_load_becomes_sick_and_claims_nothing(
    bench, farm_environment, start_agent, tmp_path
):
    environment = loading_script(tmp_path, farm_environment, do="crash")
    job = bench.submit()
    agent = start_agent(environment=environment, wait=False)
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "sick", "the group being sick")
    assert bench.job(job.id).attempts == 0
    assert agent.failure is None


def test_engine_that_refuses_to_load_ends_the_agent(start_agent, farm_environment):
    environment = {name: text for name, text in farm_environment.items() if name != "MAGI2_TESTING"}
    agent = start_agent(environment=environment, wait=False)
    agent.thread.join(60)
    assert isinstance(agent.failure, AgentError)
    assert "MAGI2_TESTING=1" in str(agent.failure)
