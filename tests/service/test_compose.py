"""compose.yaml at work without containers: its commands, environment and health checks as local processes.

Nothing is listed here a second time: what runs is read from the file by its parser. Only what a container
supplies is filled in: names of hosts, ports, mounted folders and where programs lie.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from farm.embedded.binaries import POSTGRES, VALKEY, WEED, find_program
from farm.embedded.ports import free_ports
from farm.embedded.postgres import PostgresServer
from farm.embedded.process import leashed, log_tail
from magi2.media.probe import breaches, probe
from tests.compose_file import ROOT, services

WAIT_S = 400
PROMPT = "A tea seller pours one cup."


class Composed:
    """The services of the file as local processes; a stand-in for `docker compose --profile cpu up`."""

    def __init__(self, folder: Path, checkpoint: Path, database_port: int) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.redis_port, self.s3_port, *self.inner = free_ports(6)
        self.ports = {"redis:6379": self.redis_port, "s3:8333": self.s3_port, "postgres:5432": database_port}
        self.own_ports = {name: free_ports(2) for name in services()}
        self.secrets = folder / "secrets"
        subprocess.run([sys.executable, "deploy/make_secrets.py", str(self.secrets)], cwd=ROOT, check=True)
        for secret in self.secrets.iterdir():
            text = secret.read_text()
            secret.chmod(0o644)
            secret.write_text(self.fill(text, "postgres"))

    def fill(self, text: str, name: str) -> str:
        """Replace what a container would supply."""
        for host, port in self.ports.items():
            text = text.replace(host, f"127.0.0.1:{port}")
        first, second = self.own_ports[name]
        for old, new in (
            ("/run/secrets", str(self.secrets)),
            ("/opt/tiny-checkpoint", str(self.checkpoint)),
            ("0.0.0.0", "127.0.0.1"),
            (":8333", f":{self.s3_port}"),
            ("=8333", f"={self.s3_port}"),
            (":9100", f":{first}"),
            (":8000", f":{second}"),
        ):
            text = text.replace(old, new)
        return {"9100": str(first), "8000": str(second), "/state": str(self.folder / name)}.get(text, text)

    def environment(self, name: str) -> dict[str, str]:
        programs = [Path(sys.executable).parent, *(find_program(program, os.environ).parent
                                                   for program in (VALKEY, POSTGRES, WEED))]  # fmt: skip
        given = services()[name].get("environment") or {}
        return {
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **{variable: self.fill(value, name) for variable, value in given.items()},
        }

    def command(self, name: str) -> list[str]:
        words = [self.fill(word, name) for word in services()[name]["command"]]
        if name == "redis":
            return [*words[:-1], str(self.data(name)), "--port", str(self.redis_port), "--bind", "127.0.0.1"]
        if name == "s3":
            ports = [f"-{part}.port={port}" for part, port in
                     zip(("master", "volume", "filer", "admin"), self.inner, strict=True)]  # fmt: skip
            return ["weed", *(word.replace("/data", str(self.data(name))) for word in words), *ports]
        return words

    def found(self, words: list[str], name: str) -> list[str]:
        """Look the program up where the container would have it."""
        program = shutil.which(words[0], path=self.environment(name)["PATH"])
        assert program is not None, words[0]
        return [program, *words[1:]]

    def data(self, name: str) -> Path:
        folder = self.folder / f"{name}-data"
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, name: str) -> None:
        """Start a service and wait until its own health check passes."""
        command = leashed(self.found(self.command(name), name))
        place = {"cwd": self.data(name), "env": self.environment(name), "start_new_session": True}
        with (self.logs / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, **place)
        deadline = time.monotonic() + WAIT_S
        while not self.is_healthy(name):
            assert self.running[name].poll() is None, self.tail(name)
            assert time.monotonic() < deadline, f"{name} did not become healthy\n{self.tail(name)}"
            time.sleep(0.3)

    def is_healthy(self, name: str) -> bool:
        kind, *words = services()[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if name == "redis":
            words = [words[0], "-p", str(self.redis_port), *words[1:]]
        checked = subprocess.run(
            self.found([self.fill(word, name) for word in words], name),
            env=self.environment(name), cwd=ROOT, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        return checked.returncode == 0

    def run(self, name: str, *words: str) -> str:
        """Run a one-shot service, or another command in the place of one, as `docker compose run` does."""
        command = self.found(list(words) or self.command(name), name)
        place = {"cwd": self.data(name), "env": self.environment(name), "timeout": WAIT_S}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **place)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        return done.stdout

    def stop(self) -> None:
        """End all, the youngest first."""
        for process in reversed(self.running.values()):
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def tail(self, name: str) -> str:
        return log_tail(self.logs / f"{name}.log")


@pytest.fixture
def composed(postgres: PostgresServer, tmp_path: Path, short_checkpoint: Path) -> Iterator[Composed]:
    port = httpx.URL(postgres.url_of("postgres")).port or 0
    stack = Composed(tmp_path, short_checkpoint, port)
    name = f"composed_{os.getpid()}"
    with psycopg.connect(postgres.url_of("postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    # As POSTGRES_USER, POSTGRES_DB and POSTGRES_PASSWORD_FILE would have it, on the server of these tests.
    (stack.secrets / "database_url").write_text(postgres.url_of(name))
    try:
        yield stack
    finally:
        stack.stop()
        with psycopg.connect(postgres.url_of("postgres"), autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        shutil.rmtree(tmp_path / "s3-data", ignore_errors=True)


@pytest.mark.timeout(1200)
def test_commands_of_the_file_take_a_job_to_its_clip(composed: Composed, tmp_path: Path) -> None:
    for name in ("redis", "s3"):
        composed.start(name)
    assert_postgres_check_passes(composed)
    composed.run("migrate")
    composed.run("bucket")
    for name in ("api", "ticker", "worker-tiny"):
        composed.start(name)
    key = composed.run("api", "magi2-farm", "key", "create", "--account", "studio").split()[-1]

    url = f"http://127.0.0.1:{composed.own_ports['api'][1]}"
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
        fields: Mapping[str, Any] = {"prompt": PROMPT, "num_inference_steps": 1, "size": "448x256"}
        answer = client.post("/v1/videos", json=fields)
        assert answer.status_code == 200, answer.text
        job_id = answer.json()["id"]
        deadline = time.monotonic() + WAIT_S
        while (video := client.get(f"/v1/videos/{job_id}").json())["status"] != "completed":
            assert video["status"] != "failed", f"{video}\n{composed.tail('worker-tiny')}"
            assert time.monotonic() < deadline, f"{video}\n{composed.tail('worker-tiny')}"
            time.sleep(0.5)
        clip = tmp_path / "clip.mp4"
        # By the link, signed for the public address, as a browser of a user would.
        clip.write_bytes(client.get(f"/v1/videos/{job_id}/content", follow_redirects=True).content)
    assert breaches(probe(clip), 448, 256) == []
    assert_scraped(composed, "worker-tiny", 'magi2_attempts_total{profile="tiny-cpu"} 1.0')
    assert_scraped(composed, "ticker", "magi2_sweep_last_success_timestamp")


def assert_postgres_check_passes(composed: Composed) -> None:
    kind, *words = services()["postgres"]["healthcheck"]["test"]
    port = str(composed.ports["postgres:5432"])
    checked = subprocess.run(
        composed.found([*words, f"--port={port}"], "postgres"),
        env=composed.environment("postgres"),
        capture_output=True,
        check=False,
    )
    assert (kind, checked.returncode) == ("CMD", 0)


def assert_scraped(composed: Composed, name: str, line: str) -> None:
    token = (composed.secrets / "metrics_token").read_text()
    url = f"http://127.0.0.1:{composed.own_ports[name][0]}/metrics"
    assert httpx.get(url, trust_env=False).status_code == 401
    scraped = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
    assert line in scraped.text
