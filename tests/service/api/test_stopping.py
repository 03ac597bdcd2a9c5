"""SIGTERM to a busy api process: streams say when to come again, nothing accepted is lost, exit 0."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.service.api.conftest import SUBMIT, Farm
from tests.service.api.test_events import Reader

ROOT = Path(__file__).parents[3]


@pytest.fixture
def process(farm_environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "api.log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "api"], cwd=ROOT, env=farm_environment, stdout=log, stderr=log
        )
    yield running
    running.kill()
    running.wait()


def stuck_reader(port: int, key: str, path: str) -> socket.socket:
    """Ask for a stream and never read it."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    request = f"GET {path} HTTP/1.1\r\nHost: farm\r\nAuthorization: Bearer {key}\r\n\r\n"
    connection.sendall(request.encode())
    return connection


@pytest.mark.req("F-26")
def test_stop_of_a_busy_process_closes_streams_answers_waiters_and_loses_nothing(
    farm: Farm, farm_environment: dict[str, str], process: subprocess.Popen[bytes]
) -> None:
    port = int(farm_environment["FARM_API_PORT"])
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {farm.key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as api:
        while True:
            try:
                if api.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None
            time.sleep(0.05)
        video_id = api.post("/v1/videos", json=SUBMIT).json()["id"]
        events = f"/v1/videos/{video_id}/events"
        readers = [Reader(url, farm.key, path) for path in (events, "/v1/events", events)]
        readers[0].next("snapshot")
        stuck = [stuck_reader(port, farm.key, events) for _ in range(4)]
        accepted: list[str] = []
        stop = threading.Event()

        def keep_submitting() -> None:
            while not stop.is_set():
                try:
                    answer = httpx.post(f"{url}/v1/videos", json=SUBMIT, headers=headers, timeout=60)
                except httpx.TransportError:
                    return
                if answer.status_code == 200:
                    accepted.append(answer.json()["id"])

        with ThreadPoolExecutor(8) as pool:
            waiting = pool.submit(api.get, f"/v1/videos/{video_id}", params={"wait": 60})
            sync = pool.submit(api.post, "/v1/videos/sync", json=SUBMIT)
            ends = [pool.submit(lambda one=one: list(one)[-1][0]) for one in readers]  # type: ignore[misc] # a loop
            pool.submit(keep_submitting)
            while len(accepted) < 3 or farm.num_jobs() < 5:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            stop.set()
            assert [end.result(60) for end in ends] == ["reconnect"] * 3
            assert waiting.result(60).json()["state"] == "queued"
            assert sync.result(60).json()["code"] == "draining"
        for connection in stuck:
            connection.close()
    assert code == 0
    kept = {row.id for row in farm.execute("SELECT id FROM job")}
    assert set(accepted) <= kept
    assert sync.result().json()["video_id"] in kept
