"""Doorbells over a real broker: a ring wakes the agent, and no message can lose, double or hold up a job."""

import base64
import json
import threading

import pytest
import redis

from farm.doorbell import DoorbellError, make_celery, publish_doorbell, queue_of
from farm.jobs.states import State
from farm.metrics.families import REGISTRY
from tests.service.worker.harness import PROFILE, chaos, is_alive, wait_until
from worker.consumer import DoorbellConsumer

NEVER_S = 3600.0


@pytest.fixture
def publisher(settings):
    app = make_celery(settings)
    yield app
    app.close()


@pytest.fixture
def start_consumer(settings):
    """Return a function that starts a consumer for a ring; it is stopped with the test."""
    started = []

    def start(ring, on_shutdown=lambda: None):
        consumer = DoorbellConsumer(settings, PROFILE, "group_test", ring=ring, on_shutdown=on_shutdown)
        consumer.start()
        started.append(consumer)
        return consumer

    yield start
    for consumer in started:
        consumer.stop()


@pytest.fixture
def client(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def test_message_names_a_job_and_carries_nothing_of_it(bench, publisher, client):
    job = bench.submit("A secret recipe.")
    publish_doorbell(publisher, job.id, job.profile)
    (text,) = client.lrange(queue_of(PROFILE), 0, -1)
    message = json.loads(text)
    body = base64.b64decode(message["body"])
    assert json.loads(body)[:2] == [[], {"job_id": job.id, "profile": PROFILE}]
    assert message["headers"]["task"] == "render"
    assert len(body) < 500
    assert "secret recipe" not in text
    assert "secret recipe" not in body.decode()


def test_rings_are_counted_by_what_the_claim_found(bench, start_agent):
    def counted(result):
        return REGISTRY.get_sample_value("magi2_doorbells_total", {"result": result})

    agent = start_agent(poll_s=NEVER_S)
    empty, claimed = counted("empty"), counted("claimed")
    agent.agent.ring("video_gone", PROFILE)
    wait_until(lambda: counted("empty") == empty + 1, "an empty ring")
    job = bench.submit()
    agent.agent.ring(job.id, PROFILE)
    bench.wait(job, State.SUCCEEDED)
    assert counted("claimed") == claimed + 1


def test_ring_is_answered_and_acknowledged_at_once(publisher, client, start_consumer):
    rings = []
    start_consumer(lambda job_id, profile: rings.append((job_id, profile)))
    publish_doorbell(publisher, "video_x", PROFILE)
    wait_until(lambda: rings, "the ring")
    assert rings == [("video_x", PROFILE)]
    wait_until(lambda: client.hlen("unacked") == 0, "the message being acknowledged")
    assert client.llen(queue_of(PROFILE)) == 0


def test_ring_wakes_an_agent_that_would_never_look_by_itself(bench, publisher, start_agent, start_consumer):
    agent = start_agent(poll_s=NEVER_S)
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "ready", "the agent being idle")
    start_consumer(agent.agent.ring)
    for _ in range(2):
        job = bench.submit()
        publish_doorbell(publisher, job.id, job.profile)
        bench.wait(job, State.SUCCEEDED)


def test_poll_finds_what_no_ring_told_of(bench, start_agent):
    agent = start_agent()
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "ready", "the agent being idle")
    bench.wait(bench.submit(), State.SUCCEEDED)


def test_doubled_late_and_unknown_rings_change_nothing(bench, publisher, start_agent, start_consumer):
    agent = start_agent()
    start_consumer(agent.agent.ring)
    job = bench.submit()
    for job_id in (job.id, job.id, "video_that_never_was"):
        publish_doorbell(publisher, job_id, PROFILE)
    bench.wait(job, State.SUCCEEDED)
    publish_doorbell(publisher, job.id, PROFILE)
    bench.wait(bench.submit(), State.SUCCEEDED)
    assert bench.job(job.id).epoch == 1


def test_celery_tools_get_an_answer_in_the_middle_of_a_render(bench, publisher, start_agent, start_consumer):
    agent = start_agent()
    start_consumer(agent.agent.ring)
    job = bench.submit(chaos(step_s=0.05), steps=60)
    bench.wait_for_step(job)
    answer = wait_until(lambda: publisher.control.inspect(timeout=1).ping(), "an answer")
    assert answer == {f"{PROFILE}@group_test": {"ok": "pong"}}
    assert bench.job(job.id).state == State.RUNNING
    bench.cancel(job)
    bench.wait(job, State.CANCELED)


def test_shutdown_by_celery_tools_is_a_drain(publisher, start_agent, start_consumer):
    agent = start_agent()
    start_consumer(agent.agent.ring, on_shutdown=agent.agent.drain)
    wait_until(lambda: publisher.control.inspect(timeout=1).ping(), "the consumer listening")
    publisher.control.shutdown()
    agent.thread.join(60)
    assert not agent.thread.is_alive()


def test_ranks_that_a_ring_brought_back_outlive_its_thread(bench, publisher, start_agent, start_consumer):
    agent = start_agent(poll_s=NEVER_S)
    wait_until(lambda: bench.group_state(agent.agent.group_id) == "ready", "the agent being idle")
    others = set(threading.enumerate())
    consumer = start_consumer(agent.agent.ring)
    agent.agent.group._ranks[0].signal(9)
    wait_until(lambda: not agent.agent.group.is_ready, "the end of the rank being seen")
    job = bench.submit()
    publish_doorbell(publisher, job.id, PROFILE)
    bench.wait(job, State.SUCCEEDED)
    (pid,) = agent.pids
    consumer.stop()
    wait_until(
        lambda: not [one for one in {*threading.enumerate()} - others if "ThreadPoolExecutor" in one.name],
        "the end of the consumer's threads",
    )
    assert is_alive(pid)
    assert agent.agent.group.answers()


def test_broker_that_is_away_fails_the_publisher_within_seconds(settings):
    app = make_celery(settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"}))
    with pytest.raises(DoorbellError):
        publish_doorbell(app, "video_x", PROFILE)
    app.close()


def test_only_celery_keeps_keys_for_ever(bench, publisher, client, start_agent, start_consumer):
    agent = start_agent()
    start_consumer(agent.agent.ring)
    job = bench.submit()
    publish_doorbell(publisher, job.id, PROFILE)
    bench.wait(job, State.SUCCEEDED)
    lasting = {key for key in client.scan_iter() if client.ttl(key) == -1}
    assert all(key.startswith("_kombu.") for key in lasting - {"unacked", "unacked_index", "unacked_mutex"})
