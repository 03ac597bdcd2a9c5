"""The embedded servers: real, on loopback only, usable again after their starter was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
import redis

from farm.embedded.postgres import PostgresServer
from farm.embedded.process import EmbeddedError
from farm.embedded.seaweed import SeaweedServer
from farm.embedded.servers import EmbeddedServers
from tests import server_folder
from tests.service.conftest import ROOT, S3Place
from tests.service.embedded.processes import LOOPBACK_ADDRESSES, descendants, is_alive, listening_addresses

# Starts PostgreSQL on the folder named by the first argument, says who runs, and waits to be killed.
STARTER = """
import os, pathlib, sys, time
from farm.embedded.postgres import PostgresServer
server = PostgresServer(pathlib.Path(sys.argv[1]), os.environ, password="pw", is_disposable=True)
server.wait_ready()
print(server.child.pid, flush=True)
time.sleep(600)
"""


def test_every_server_answers(servers: EmbeddedServers, s3: S3Place) -> None:
    with psycopg.connect(servers.postgres.url) as connection:
        assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
    with redis.Redis.from_url(servers.valkey.url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    client = s3.client()
    client.put_object(Bucket=s3.bucket, Key=f"{s3.prefix}/x", Body=b"abc")
    assert client.get_object(Bucket=s3.bucket, Key=f"{s3.prefix}/x")["Body"].read() == b"abc"


def test_servers_listen_on_loopback_only(servers: EmbeddedServers) -> None:
    pids = {servers.postgres.child.pid, servers.valkey.child.pid, servers.seaweedfs.child.pid}
    ports = {servers.postgres.port, servers.valkey.port, servers.seaweedfs.port}
    addresses = listening_addresses(pids, ports)
    assert ports <= {port for _, port in addresses}
    assert {address for address, _ in addresses} <= LOOPBACK_ADDRESSES


def test_database_wants_the_password(servers: EmbeddedServers) -> None:
    wrong = servers.postgres.url.replace(":" + servers.postgres._password + "@", ":wrong@")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)


def test_server_dies_with_its_killed_starter_and_starts_again(open_directory: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(open_directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pid = int(starter.stdout.readline())
    below = descendants(starter.pid)
    assert pid in below
    starter.kill()
    starter.communicate()
    wait_for_end(below)
    again = PostgresServer(open_directory, os.environ, password="pw", is_disposable=True)
    try:
        again.wait_ready()
        with psycopg.connect(again.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        again.stop()


def test_stale_pid_file_of_another_program_is_removed(open_directory: Path) -> None:
    first = PostgresServer(open_directory, os.environ, password="pw", is_disposable=True)
    first.wait_ready()
    first.child.kill()
    pid_file = first.child.spec.cwd / "postmaster.pid"
    lines = pid_file.read_text().split("\n")
    # This very process stands for a program that got the dead server's number.
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]))
    again = PostgresServer(open_directory, os.environ, password="pw", is_disposable=True)
    try:
        again.wait_ready()
    finally:
        again.stop()


def test_closed_folder_of_root_still_gets_a_database(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = PostgresServer(closed / "postgres", os.environ, password="pw", is_disposable=True)
    try:
        server.wait_ready()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        server.stop()
    assert not is_alive(server.child.pid)


def test_server_that_ends_at_once_is_reported_with_its_log(open_directory: Path, tmp_path: Path) -> None:
    broken = tmp_path / "weed"  # no program may run where the data of tests lies in memory
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 7\n")
    broken.chmod(0o755)
    server = SeaweedServer(
        open_directory / "s3",
        {**os.environ, "MAGI2_WEED_BIN": str(broken)},
        access_key="access",
        secret_key="secret",
        bucket="farm",
    )
    with pytest.raises(EmbeddedError, match=r"(?s)exit code 7.*no such flag"):
        server.wait_ready()


def wait_for_end(pids: set[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {sorted(filter(is_alive, pids))}"
        time.sleep(0.05)


def test_killed_server_is_started_again_on_its_port(servers: EmbeddedServers) -> None:
    port, before = servers.valkey.port, servers.valkey.child.pid
    os.kill(before, signal.SIGKILL)
    assert servers.valkey.child.wait(60)
    [line] = servers.keep_running()
    assert line.startswith("valkey ended")
    with redis.Redis(port=port) as client:
        assert client.ping()
    assert servers.valkey.child.pid != before


def test_folder_that_a_killed_run_left_is_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(server_folder, "ROOM_BYTES", 0)
    used = server_folder.make_server_folder()
    left, new = (tmp_path / f"{server_folder.PREFIX}{name}" for name in ("left", "new"))
    for folder in (left, new):
        folder.mkdir()
    for folder in (left, used):
        os.utime(folder, (1, 1))
    server_folder.remove_left(tmp_path)
    assert set(tmp_path.iterdir()) == {used, new}
