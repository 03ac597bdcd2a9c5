"""Live progress over a real broker, and without one."""

import json

import pytest
import redis

from farm.progress import CHANNEL, MIN_INTERVAL_S, PAUSE_S, ProgressPublisher, decode, progress_key


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def publisher(redis_url, clock):
    publisher = ProgressPublisher(redis_url, clock=clock)
    yield publisher
    publisher.close()


@pytest.fixture
def client(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


def stored(client):
    text = client.get(progress_key("video_a"))
    return None if text is None else json.loads(text)["step"]


def test_report_is_kept_for_late_readers_and_told_to_listeners(publisher, client):
    with client.pubsub() as listener:
        listener.subscribe(CHANNEL)
        assert listener.get_message(timeout=60)["type"] == "subscribe"
        publisher.publish("video_a", {"step": 1})
        assert decode(listener.get_message(timeout=60)["data"]) == {"id": "video_a", "step": 1}
    assert stored(client) == 1


def test_reports_in_a_hurry_wait_and_the_newest_wins(publisher, client, clock):
    for step in (1, 2, 3):
        publisher.publish("video_a", {"step": step})
    assert stored(client) == 1
    clock.now += MIN_INTERVAL_S
    publisher.flush()
    assert stored(client) == 3


def test_finished_job_leaves_no_report_behind(publisher, client, clock):
    publisher.publish("video_a", {"step": 1})
    publisher.publish("video_a", {"step": 2})
    publisher.clear("video_a")
    clock.now += MIN_INTERVAL_S
    publisher.flush()
    assert stored(client) is None


def test_broker_that_is_away_costs_one_try_and_then_a_pause(clock):
    publisher = ProgressPublisher("redis://127.0.0.1:1/0", clock=clock)
    publisher.publish("video_a", {"step": 1})
    tries = []
    publisher._client.pipeline = lambda **_: tries.append(1)
    clock.now += PAUSE_S - 0.1
    publisher.publish("video_a", {"step": 2})
    assert tries == []
    publisher.clear("video_a")
    publisher.close()
