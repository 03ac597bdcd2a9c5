"""Event streams of pages: what they send, to whom, and how they end."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from farm import admins
from farm.admins import Role
from farm.db.session import unit_of_work
from tests.service.api.conftest import SUBMIT, Farm, Served

PASSWORD = "correct horse battery"


@pytest.fixture
def served(farm: Farm, serve: Callable[..., Served]) -> Served:
    with unit_of_work(farm.database) as conn:
        admins.create(conn, "alice", Role.VIEWER, admins.hash_password(PASSWORD), by="system:cli")
    return serve()


@contextmanager
def visitor(served: Served) -> Iterator[httpx.Client]:
    form = {"name": "alice", "password": PASSWORD}
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        assert client.post("/admin/login", data=form, headers={"Origin": served.url}).status_code == 303
        yield client


def events(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event:"):
            name = line.partition(":")[2].strip()
        elif line.startswith("data:"):
            yield name, line.partition(":")[2].strip()


def test_stream_sends_what_changed_and_says_farewell_when_the_api_stops(farm: Farm, served: Served) -> None:
    with visitor(served) as client, client.stream("GET", "/admin/live/jobs") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        received = events(answer)
        name, data = next(received)
        assert (name, list(json.loads(data))) == ("regions", ["job_list"])
        assert "No jobs yet" in data
        key = {"Authorization": f"Bearer {farm.key}"}
        job_id = httpx.post(f"{served.url}/v1/videos", json=SUBMIT, headers=key, timeout=60).json()["id"]
        name, data = next(received)
        assert (name, job_id in data) == ("regions", True)
        served.server.should_exit = True
        assert "reconnect" in {name for name, _ in received}


def test_stream_needs_a_login_and_a_page_that_exists(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as stranger:
        assert stranger.get("/admin/live/jobs").status_code == 303
    with visitor(served) as client:
        assert client.get("/admin/live/jobs/video_0").status_code == 404
        assert client.get("/admin/live/audit").status_code == 404
