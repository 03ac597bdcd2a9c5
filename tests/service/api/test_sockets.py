"""What only a real server shows: bodies that are too long, too slow or broken off, streams, and stopping."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from api.body import BodyRules
from tests.service.api.conftest import CLIP, SUBMIT, Farm, Served

Serve = Callable[..., Served]
SHORT = BodyRules(max_bytes=200_000, timeout_s=1.0)


def exchange(served: Served, head: list[str], pieces: list[bytes], pause_s: float = 0) -> bytes:
    """Send a request by hand and return whatever comes back until the server closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as sock:
        lines = ["POST /v1/videos HTTP/1.1", "Host: farm", *head, "", ""]
        sock.sendall("\r\n".join(lines).encode())
        try:
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(pause_s)
        except (ConnectionResetError, BrokenPipeError):
            pass
        try:
            while data := sock.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
    return answer


def authorized(farm: Farm, *lines: str) -> list[str]:
    return [f"Authorization: Bearer {farm.key}", "Content-Type: application/json", *lines]


def test_body_over_the_limit_is_refused_before_it_is_sent(farm: Farm, serve: Serve) -> None:
    answer = exchange(serve(SHORT), authorized(farm, "Content-Length: 200001"), [])
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"payload_too_large" in answer
    assert b"connection: close" in answer.lower()


def test_chunked_body_over_the_limit_is_cut_off(farm: Farm, serve: Serve) -> None:
    piece = b"4000\r\n" + bytes(0x4000) + b"\r\n"
    answer = exchange(serve(SHORT), authorized(farm, "Transfer-Encoding: chunked"), [piece] * 14)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_slow_body_is_given_up(farm: Farm, serve: Serve) -> None:
    head = authorized(farm, "Content-Length: 100")
    answer = exchange(serve(SHORT), head, [b"{"] * 30, pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


def test_connection_that_breaks_off_leaves_no_job(farm: Farm, serve: Serve) -> None:
    served = serve(SHORT)
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        head = ["POST /v1/videos HTTP/1.1", "Host: farm", *authorized(farm, "Content-Length: 1000"), "", ""]
        sock.sendall("\r\n".join(head).encode() + b'{"prompt": ')
    assert httpx.get(f"{served.url}/livez").status_code == 200
    assert farm.num_jobs() == 0


def test_answer_to_head_is_followed_by_the_next_answer(farm: Farm, serve: Serve) -> None:
    """Were a body sent after a HEAD, the connection's next answer would be read as rubbish."""
    headers = {"Authorization": f"Bearer {farm.key}"}
    with httpx.Client(base_url=serve().url, headers=headers) as client:
        for _ in range(2):
            assert client.head("/v1/models").status_code == 200
            assert client.get("/v1/models").json()["object"] == "list"


def test_clip_streams_in_pieces_and_in_ranges(farm: Farm, serve: Serve) -> None:
    headers = {"Authorization": f"Bearer {farm.key}"}
    with httpx.Client(base_url=serve().url, headers=headers) as client:
        video_id = client.post("/v1/videos", json=SUBMIT).json()["id"]
        farm.finish()
        path = f"/v1/videos/{video_id}/content?redirect=false"
        whole = client.get(path)
        halves = [
            client.get(path, headers={"Range": header}).content for header in ("bytes=0-4999", "bytes=5000-")
        ]
        head = client.head(path)
    assert whole.content == b"".join(halves) == CLIP
    assert head.headers["content-length"] == str(len(CLIP))


def test_reader_that_goes_away_gives_its_connection_to_the_store_back(farm: Farm, serve: Serve) -> None:
    """More broken downloads than the client of the store has connections, and the next one still works."""
    headers = {"Authorization": f"Bearer {farm.key}"}
    with httpx.Client(base_url=serve().url, headers=headers, timeout=30) as client:
        video_id = client.post("/v1/videos", json=SUBMIT).json()["id"]
        claimed = farm.finish()
        big = bytes(8 << 20)
        (row,) = farm.execute("SELECT key FROM asset WHERE kind = 'video'")
        farm.store.put(row.key, big, "video/mp4")
        farm.execute("UPDATE asset SET bytes = :size WHERE kind = 'video'", size=len(big))
        path = f"/v1/videos/{video_id}/content?redirect=false"
        for _ in range(40):
            with client.stream("GET", path) as answer:
                next(answer.iter_raw())
        assert len(client.get(path).content) == len(big)
    assert claimed.job.id == video_id


async def test_long_poll_answers_when_the_server_is_stopped(farm: Farm, serve: Serve) -> None:
    served = serve()
    headers = {"Authorization": f"Bearer {farm.key}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as client:
        video_id = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
        waiting = asyncio.create_task(client.get(f"/v1/videos/{video_id}", params={"wait": 60}))
        while not served.server.server_state.tasks:  # noqa: ASYNC110 - it has no event of its own
            await asyncio.sleep(0.02)
        served.server.should_exit = True
        answer = await asyncio.wait_for(waiting, 60)
    assert answer.json()["state"] == "queued"


def test_process_serves_and_exits_with_0_on_sigterm(farm: Farm, farm_environment: dict[str, str]) -> None:
    port = farm_environment["FARM_API_PORT"]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "api"]
    with subprocess.Popen(
        command, cwd=root, env=farm_environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}/readyz")
            headers = {"Authorization": f"Bearer {farm.key}"}
            url = f"http://127.0.0.1:{port}/v1/videos"
            assert httpx.post(url, json={**SUBMIT, "prompt": "xyzzy"}, headers=headers).status_code == 200
        finally:
            process.terminate()
            _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert '"event": "job_submitted"' in log or "job_submitted" in log
    assert [word for word in ("xyzzy", farm.key) if word in log] == []


@pytest.mark.parametrize("name", ["FARM_SECRET_KEY", "DATABASE_URL"])
def test_process_that_lacks_a_setting_says_which_and_exits_with_2(
    farm_environment: dict[str, str], name: str
) -> None:
    environment = {key: value for key, value in farm_environment.items() if key != name}
    command = [sys.executable, "-m", "api"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def _wait_until_ready(url: str) -> None:
    for _ in range(900):
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} never became ready")
