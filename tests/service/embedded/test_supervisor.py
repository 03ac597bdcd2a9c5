"""The embedded farm as a user meets it: `up` and `demo` as commands, in a state folder of their own.

One job that the first start leaves unfinished and one of the demo are rendered here.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from farm.embedded.state import StateDirectory
from magi2.media.probe import breaches, probe
from tests.service.conftest import ROOT
from tests.service.embedded.conftest import opened_directory
from tests.service.embedded.processes import LOOPBACK_ADDRESSES, descendants, is_alive, listening_addresses
from tests.service.farm_processes import wait_until

START_S = 240
# A farm starts a database and loads an engine, on whatever cores there are.
pytestmark = pytest.mark.timeout(1200)
NAMED_PARTS = ("DATABASE_URL", "REDIS_URL", "S3_ENDPOINT_URL")


class Up:
    """A running `magi2-farm up`."""

    def __init__(self, environment: dict[str, str], output: Path) -> None:
        self.environment = environment
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "farm.cli", "up"],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        wait_until(self._has_announced, f"an announcement of up: {self.text()}", START_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=120)

    def text(self) -> str:
        return self.output.read_text()

    def pids(self) -> set[int]:
        """Return everything that it runs."""
        return descendants(self.process.pid)

    def _has_announced(self) -> bool:
        assert self.process.poll() is None, self.text()
        return "Ctrl-C stops everything" in self.text()


def environment_for(state: Path, checkpoint: Path) -> dict[str, str]:
    """Return what the commands get: a state folder of their own that has its checkpoint already."""
    shutil.copytree(checkpoint, state / "tiny-checkpoint")
    inherited = {name: value for name, value in os.environ.items() if name not in NAMED_PARTS}
    # The phases of a short render must be known soon.
    return {**inherited, "FARM_STATE_DIR": str(state), "FARM_WORKER__HEARTBEAT_S": "0.5"}


@pytest.fixture
def environment(open_directory: Path, short_checkpoint: Path) -> dict[str, str]:
    return environment_for(open_directory / "state", short_checkpoint)


@pytest.fixture
def start_up(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Return a function that starts `magi2-farm up`; what still runs is ended at the end."""
    started: list[Up] = []

    def start(**variables: str) -> Up:
        up = Up({**environment, **variables}, tmp_path / f"up{len(started)}.log")
        started.append(up)
        up.wait_ready()
        return up

    yield start
    for up in started:
        up.end()


@pytest.fixture(scope="module")
def shared(short_checkpoint: Path) -> Iterator[Up]:
    """One farm for the tests that leave it as they found it."""
    with opened_directory() as folder:
        up = Up(environment_for(folder / "state", short_checkpoint), folder / "up.log")
        try:
            up.wait_ready()
            yield up
        finally:
            up.end()


def client_of(environment: dict[str, str]) -> httpx.Client:
    access = StateDirectory(Path(environment["FARM_STATE_DIR"])).access()
    return httpx.Client(
        base_url=access.url, headers={"Authorization": f"Bearer {access.key}"}, timeout=30, trust_env=False
    )


def phase_of(client: httpx.Client, job_id: str) -> str | None:
    return client.get(f"/v1/videos/{job_id}").json()["phase"]


def all_ended(pids: set[int]) -> Callable[[], bool]:
    return lambda: not any(map(is_alive, pids))


def test_next_start_finishes_the_job_that_ctrl_c_interrupted(
    start_up: Callable[..., Up], environment: dict[str, str], tmp_path: Path
) -> None:
    first = start_up()
    with client_of(environment) as client:
        request = {"prompt": "Fog lifts off a lake.", "num_inference_steps": 1, "profile": "tiny-cpu"}
        job_id = client.post("/v1/videos", json=request).json()["id"]
        wait_until(
            lambda: client.get(f"/v1/videos/{job_id}").json()["phase"] == "denoise",
            f"work; {first.text()}",
            300,
        )
    pids = first.pids()
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(timeout=120) == 0
    wait_until(all_ended(pids), f"the end of {sorted(filter(is_alive, pids))}")

    clip = tmp_path / "demo.mp4"
    demo = subprocess.run(
        [sys.executable, "-m", "farm.cli", "demo", "--steps", "2", "-o", str(clip)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr
    assert breaches(probe(clip), 448, 256) == []
    # The tiny engine may take both steps between two looks of the demo: which of them it sees is left open.
    assert re.search(r"denoise step [0-2]/2", demo.stderr)
    key = json.loads((Path(environment["FARM_STATE_DIR"]) / "access.json").read_text())["key"]
    assert key in first.text()
    assert key not in demo.stdout + demo.stderr

    again = start_up()
    with client_of(environment) as client:
        video = client.get(f"/v1/videos/{job_id}").json()
    assert (video["status"], video["attempt"]) == ("completed", 2)
    assert key not in again.text()


def test_killed_supervisor_leaves_nothing_and_the_next_start_works_without_its_port(
    start_up: Callable[..., Up], environment: dict[str, str]
) -> None:
    first = start_up()
    pids = first.pids()
    assert len(pids) >= 6
    first.process.kill()
    first.process.wait()
    wait_until(all_ended(pids), f"the end of {sorted(filter(is_alive, pids))}")
    state = StateDirectory(Path(environment["FARM_STATE_DIR"]))
    port = int((state.path / "api-port").read_text())
    assert state.access().url == f"http://127.0.0.1:{port}"
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the killed api linger
        taken.bind(("127.0.0.1", port))
        taken.listen()
        start_up()
        assert state.access().url != f"http://127.0.0.1:{port}"


def test_operators_drain_finishes_the_job_and_lasts_until_it_is_taken_back(shared: Up) -> None:
    def groups(*arguments: str) -> str:
        command = [sys.executable, "-m", "farm.cli", "groups", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=shared.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    log = Path(shared.environment["FARM_STATE_DIR"]) / "logs" / "worker.log"
    [group_id] = [group["id"] for group in json.loads(groups("list", "--json"))]
    with client_of(shared.environment) as client:
        request = {"prompt": "Fog lifts off a lake.", "num_inference_steps": 2, "profile": "tiny-cpu"}
        job_id = client.post("/v1/videos", json=request).json()["id"]
        wait_until(lambda: phase_of(client, job_id) == "denoise", f"work; {shared.text()}", 300)
        groups("drain", group_id)
        wait_until(lambda: "worker ended with exit code 0" in shared.text(), "the drain", 300)
        video = client.get(f"/v1/videos/{job_id}").json()
        assert (video["status"], video["attempt"]) == ("completed", 1)
        wait_until(lambda: "groups undrain" in log.read_text(), "the wait for undrain", 60)
    groups("undrain", group_id)
    wait_until(lambda: '"ready"' in groups("list", "--json"), "the group at work again", 300)


def test_crashed_role_is_started_again(shared: Up) -> None:
    [api] = [pid for pid in shared.pids() if "api" in words_of(pid)]
    os.kill(api, signal.SIGKILL)
    wait_until(lambda: "api ended" in shared.text(), "a line about the crash")
    with client_of(shared.environment) as client:
        wait_until(lambda: answers(client), "the api again", 60)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_nothing_listens_beyond_loopback(shared: Up) -> None:
    addresses = listening_addresses(shared.pids(), set())
    assert addresses
    assert {address for address, _ in addresses} <= LOOPBACK_ADDRESSES


def test_second_supervisor_in_one_folder_is_refused(shared: Up) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "farm.cli", "up"],
        cwd=ROOT,
        env=shared.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 3
    assert f"process {shared.process.pid}" in second.stderr


def test_first_admin_is_made_by_the_command_and_opens_the_dashboard(shared: Up) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "farm.cli", "admin", "create", "night.shift"],
        cwd=ROOT,
        env=shared.environment,
        input="correct horse battery\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, "")
    with client_of(shared.environment) as client:
        wait_until(lambda: answers(client), "the api", 60)
        assert f"{client.base_url}/admin".replace("//admin", "/admin") in shared.text()
        form = {"name": "night.shift", "password": "correct horse battery"}
        origin = {"Origin": str(client.base_url).rstrip("/")}
        assert client.post("/admin/login", data=form, headers=origin).status_code == 303
        assert "<h1>Overview</h1>" in client.get("/admin/").text


def test_part_that_is_named_is_used_and_not_started(
    start_up: Callable[..., Up], environment: dict[str, str], database_url: str, redis_url: str
) -> None:
    up = start_up(DATABASE_URL=database_url, REDIS_URL=redis_url)
    programs = {words_of(pid)[0] for pid in up.pids()}
    assert not [name for name in programs if re.search(r"postgres|valkey|redis", name)]
    assert [name for name in programs if name.endswith("weed")]
    with client_of(environment) as client:
        assert client.get("/v1/videos").json()["data"] == []
