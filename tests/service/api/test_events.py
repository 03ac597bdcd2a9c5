"""Event streams over a real socket: complete, resumable, and gone in time."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from api.streams import MAX_STREAMS_PER_KEY
from farm.db.session import unit_of_work
from farm.jobs.control import delete_job
from farm.progress import CHANNEL
from tests.service.api.conftest import SUBMIT, Farm, Served


class Reader:
    """Reads one stream; each event is its name, id and data."""

    def __init__(self, url: str, key: str, path: str, **headers: str) -> None:
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}", **headers}, timeout=30
        )
        self._context = self._client.stream("GET", path)
        self.answer = self._context.__enter__()
        self._lines = self.answer.iter_lines()

    def __iter__(self) -> Iterator[tuple[str, str | None, Any]]:
        fields: dict[str, str] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
            elif "event" in fields:
                yield fields["event"], fields.get("id"), json.loads(fields["data"])
                fields = {}

    def next(self, *names: str) -> tuple[str, str | None, Any]:
        """Return the next event, of these names if there are any."""
        return next(entry for entry in self if not names or entry[0] in names)

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        self._client.close()


@pytest.fixture
def served(serve: Callable[[], Served]) -> Served:
    return serve()


@pytest.fixture
def read(farm: Farm, served: Served) -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def start(path: str, **headers: str) -> Reader:
        readers.append(Reader(served.url, headers.pop("key", farm.key), path, **headers))
        return readers[-1]

    yield start
    for reader in readers:
        reader.close()


@pytest.fixture
def api(farm: Farm, served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {farm.key}"}) as client:
        yield client


def submit(api: httpx.Client) -> str:
    return str(api.post("/v1/videos", json=SUBMIT).json()["id"])


@pytest.mark.req("F-25")
def test_stream_tells_everything_once_and_in_order(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    video_id = submit(api)
    reader = read(f"/v1/videos/{video_id}/events")
    first = reader.next()
    farm.finish()
    told = list(reader)
    headers = reader.answer.headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
    assert (first[0], first[2]["id"], first[2]["state"]) == ("snapshot", video_id, "queued")
    states = [(entry[1], entry[2]["state"]) for entry in told if entry[0] == "state"]
    assert states == [("2", "starting"), ("3", "running"), ("4", "uploading"), ("5", "succeeded")]
    assert (told[-1][0], told[-1][2]["status"]) == ("done", "completed")


@pytest.mark.req("F-25")
def test_last_event_id_replays_exactly_what_was_missed(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    video_id = submit(api)
    farm.finish()
    told = [entry[1] for entry in read(f"/v1/videos/{video_id}/events", **{"Last-Event-ID": "2"})]
    fresh = [entry[0] for entry in read(f"/v1/videos/{video_id}/events")]
    future = [entry[0] for entry in read(f"/v1/videos/{video_id}/events", **{"Last-Event-ID": "99"})]
    assert told == [None, "3", "4", "5", None]
    assert fresh == future == ["snapshot", "done"]


def test_progress_comes_from_redis_and_is_coalesced(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader], redis_url: str
) -> None:
    video_id = submit(api)
    farm.start()
    reader = read(f"/v1/videos/{video_id}/events")
    reader.next("snapshot")
    report = {"id": video_id, "epoch": 1, "phase": "denoise", "step": 3, "total": 4, "progress": 69}
    with redis.Redis.from_url(redis_url) as broker:
        while not broker.publish(CHANNEL, json.dumps(report)):
            pass  # not subscribed yet
    data = next(entry[2] for entry in reader if entry[0] == "progress" and entry[2]["progress"])
    assert (data["attempt"], data["step"], data["total_steps"], data["progress"]) == (1, 3, 4, 69)


def test_progress_comes_from_the_database_without_redis(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    video_id = submit(api)
    farm.start()
    farm.execute("UPDATE job SET phase = 'denoise', step = 2, progress = 47")
    reader = read(f"/v1/videos/{video_id}/events")
    assert reader.next("progress")[2]["progress"] == 47


def test_deleted_video_ends_its_stream(farm: Farm, api: httpx.Client, read: Callable[..., Reader]) -> None:
    video_id = submit(api)
    reader = read(f"/v1/videos/{video_id}/events")
    reader.next("snapshot")
    with unit_of_work(farm.database) as conn:
        delete_job(conn, farm.account_id, video_id, "key")
    assert [entry[2]["type"] for entry in reader] == ["canceled", "deleted"]
    assert api.get(f"/v1/videos/{video_id}/events").status_code == 404


def test_account_stream_tells_states_of_all_its_videos_and_of_no_other(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    before = submit(api)
    reader = read("/v1/events")
    key = farm.new_key("other")
    other, stranger = read("/v1/events", key=key), {"Authorization": f"Bearer {key}"}
    theirs = api.post("/v1/videos", json=SUBMIT, headers=stranger)
    mine = submit(api)
    first = reader.next()
    assert other.next()[2]["id"] == theirs.json()["id"]
    reader.close()
    api.post(f"/v1/videos/{before}/cancel")
    again = read("/v1/events", **{"Last-Event-ID": str(first[1])})
    second = again.next()
    assert (first[2]["id"], first[2]["state"]) == (mine, "queued")
    assert (second[2]["id"], second[2]["state"]) == (before, "canceled")


def test_stream_of_another_account_does_not_exist(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    path = f"/v1/videos/{submit(api)}/events"
    assert read(path, key=farm.new_key("other")).answer.status_code == 404
    assert api.head(path).headers["content-type"].startswith("text/event-stream")


@pytest.mark.req("F-12")
def test_key_has_only_so_many_streams(farm: Farm, api: httpx.Client, read: Callable[..., Reader]) -> None:
    path = f"/v1/videos/{submit(api)}/events"
    codes = [read(path).answer.status_code for _ in range(MAX_STREAMS_PER_KEY + 1)]
    assert codes == [200] * MAX_STREAMS_PER_KEY + [429]
    assert read(path, key=farm.new_key()).answer.status_code == 200


@pytest.mark.req("F-25")
def test_reader_that_never_reads_delays_nobody(
    farm: Farm, served: Served, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    video_id = submit(api)
    path = f"/v1/videos/{video_id}/events"
    request = f"GET {path} HTTP/1.1\r\nHost: farm\r\nAuthorization: Bearer {farm.key}\r\n\r\n"
    dead = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
    for connection in dead:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(request.encode())
    reader = read(path)
    reader.next("snapshot")
    farm.finish()
    assert reader.next("done")[2]["status"] == "completed"
    for connection in dead:
        connection.close()


@pytest.mark.req("F-26")
def test_stop_says_reconnect_and_ends_the_server(
    served: Served, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    readers = [read(f"/v1/videos/{submit(api)}/events"), read("/v1/events")]
    readers[0].next("snapshot")
    farewells: list[str] = []
    threads = [
        threading.Thread(target=lambda one=one: farewells.append(list(one)[-1][0]))  # type: ignore[misc] # a loop
        for one in readers
    ]
    for thread in threads:
        thread.start()
    served.server.should_exit = True
    for thread in threads:
        thread.join(60)
    assert farewells == ["reconnect", "reconnect"]


@pytest.mark.req("F-12")
def test_streams_of_a_key_count_over_all_processes(
    farm: Farm, serve: Callable[[], Served], api: httpx.Client, read: Callable[..., Reader]
) -> None:
    path = f"/v1/videos/{submit(api)}/events"
    opened = [read(path) for _ in range(MAX_STREAMS_PER_KEY)]
    other = serve()
    refused = Reader(other.url, farm.key, path)
    code = refused.answer.status_code
    refused.close()
    opened[0].close()
    while True:  # its place is free once the first process has noticed
        again = Reader(other.url, farm.key, path)
        again.close()
        if again.answer.status_code == 200:
            break
    assert (opened[-1].answer.status_code, code) == (200, 429)


def test_stream_of_a_revoked_key_ends_in_every_process(
    farm: Farm, api: httpx.Client, read: Callable[..., Reader]
) -> None:
    key = farm.new_key(name="short-lived")
    reader = read(f"/v1/videos/{submit(api)}/events", key=key)
    reader.next("snapshot")
    farm.execute("UPDATE api_key SET revoked_at = now() WHERE name = 'short-lived'")
    assert [entry[0] for entry in reader] == []
