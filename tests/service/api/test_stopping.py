"""SIGTERM to a busy api process: streams say when to come again, nothing accepted is lost, exit 0."""

import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.service.api.conftest import SUBMIT, Farm
from tests.service.api.test_events import Reader


def asked(port: int, key: str, line: str, body: bytes = b"", *, is_stuck: bool = False) -> socket.socket:
    """Send a request and read nothing yet: what is sent from now on is served after it."""
    connection = socket.create_connection(("127.0.0.1", port))
    if is_stuck:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    head = f"{line} HTTP/1.1\r\nHost: farm\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + body)
    return connection


def answered(connection: socket.socket) -> str:
    """Return the whole answer of a request that was sent before."""
    with connection, connection.makefile("rb") as file:
        return file.read().decode()


@pytest.mark.timeout(600)
@pytest.mark.req("F-26")
def test_stop_of_a_busy_process_closes_streams_answers_waiters_and_loses_nothing(
    farm: Farm, farm_environment: dict[str, str], api_process: subprocess.Popen[bytes]
) -> None:
    port = int(farm_environment["FARM_API_PORT"])
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {farm.key}"}
    submitted = httpx.post(f"{url}/v1/videos", json=SUBMIT, headers=headers, timeout=60)
    video_id = submitted.json()["id"]
    events = f"/v1/videos/{video_id}/events"
    readers = [Reader(url, farm.key, path) for path in (events, "/v1/events", events)]
    readers[0].next("snapshot")
    stuck = [asked(port, farm.key, f"GET {events}", is_stuck=True) for _ in range(4)]
    waiting = asked(port, farm.key, f"GET /v1/videos/{video_id}?wait=60")
    sync = asked(port, farm.key, "POST /v1/videos/sync", json.dumps({**SUBMIT, "seed": 77}).encode())
    accepted: list[str] = []

    def keep_submitting() -> None:
        with httpx.Client(headers=headers, timeout=60, trust_env=False) as client:
            while True:
                try:
                    answer = client.post(f"{url}/v1/videos", json=SUBMIT)
                except httpx.TransportError:
                    return
                if answer.status_code == 200:
                    accepted.append(answer.json()["id"])

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(lambda one=one: list(one)[-1][0]) for one in readers]  # type: ignore[misc] # a loop
        pool.submit(keep_submitting)
        while len(accepted) < 3 or not farm.execute("SELECT 1 FROM job WHERE seed = 77"):
            time.sleep(0.05)
        api_process.send_signal(signal.SIGTERM)
        code = api_process.wait(60)
        told = [end.result(60) for end in ends]
    for reader in readers:
        reader.close()
    for connection in stuck:
        connection.close()
    assert told == ["reconnect"] * 3
    assert '"state":"queued"' in answered(waiting)
    (of_sync,) = farm.execute("SELECT id FROM job WHERE seed = 77")
    farewell = answered(sync)
    assert all(word in farewell for word in ("503", "draining", of_sync.id))
    assert code == 0
    kept = {row.id for row in farm.execute("SELECT id FROM job")}
    assert set(accepted) <= kept
