"""The ticker as a process: it relays at once, sweeps, survives outages, and leaves when told to."""

import json
import signal
import subprocess
import sys

import pytest
import redis

from farm.db.session import make_engine
from farm.doorbell import queue_of
from farm.embedded.ports import free_ports
from farm.jobs.states import State
from tests.service.driver import PROFILE, Driver
from tests.service.farm_processes import wait_until


@pytest.fixture
def driver(settings):
    engine = make_engine(settings, application="test")
    yield Driver(engine)
    engine.dispose()


@pytest.fixture
def start(farm_environment, tmp_path):
    """Return a function that starts a ticker; all are ended after the test."""
    started = []

    def start_ticker(**changes):
        log = (tmp_path / f"ticker-{len(started)}.log").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.ticker"], cwd=tmp_path, env=farm_environment | changes, stderr=log
        )
        started.append((process, log))
        return process

    yield start_ticker
    for process, log in started:
        process.kill()
        process.wait()
        log.close()


def log_lines(tmp_path, number=0):
    return [json.loads(line) for line in (tmp_path / f"ticker-{number}.log").read_text().splitlines()]


def has_started(tmp_path):
    return any(line["msg"] == "ticker_started" for line in log_lines(tmp_path))


def leave(process):
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


def queued_doorbells(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        return client.llen(queue_of(PROFILE))


def test_a_committed_job_is_rung_for_and_sigterm_ends_the_ticker_cleanly(driver, start, redis_url, tmp_path):
    process = start()
    wait_until(lambda: has_started(tmp_path), "a ticker")
    for _ in range(3):
        driver.submit()
    wait_until(lambda: queued_doorbells(redis_url) == 3, "three doorbells")
    wait_until(lambda: driver.sql("SELECT 1 FROM outbox WHERE sent_at IS NULL") == [], "a settled outbox")
    assert leave(process) == 0


@pytest.mark.req("F-40")
def test_without_a_broker_rows_wait_sweeps_go_on_and_a_later_ticker_delivers(
    driver, start, redis_url, tmp_path
):
    (closed,) = free_ports(1)
    deaf = start(REDIS_URL=f"redis://127.0.0.1:{closed}/0")
    wait_until(lambda: has_started(tmp_path), "a ticker")
    job = driver.reach(State.RUNNING)
    driver.age(job.id, lease_until="1 second")
    wait_until(lambda: driver.job(job.id).state is State.QUEUED, "a swept lease")
    wait_until(lambda: driver.sql("SELECT 1 FROM outbox WHERE attempts > 0") != [], "a failed doorbell")
    assert leave(deaf) == 0
    start()
    wait_until(lambda: queued_doorbells(redis_url) == 2, "the doorbells that waited")


def test_the_ticker_waits_for_its_database_instead_of_ending(start, tmp_path):
    (closed,) = free_ports(1)
    process = start(DATABASE_URL=f"postgresql://farm@127.0.0.1:{closed}/farm")
    wait_until(lambda: any(line["msg"] == "sweep_failed" for line in log_lines(tmp_path)), "a failed sweep")
    assert process.poll() is None
    assert leave(process) == 0


def test_an_old_schema_is_refused_with_the_remedy(start, new_database, tmp_path):
    process = start(DATABASE_URL=new_database("template1"))
    assert process.wait(timeout=60) == 1
    assert "magi2-farm migrate" in (tmp_path / "ticker-0.log").read_text()


def test_a_missing_secret_is_refused_by_name(start, tmp_path):
    process = start(FARM_SECRET_KEY="")
    assert process.wait(timeout=60) == 1
    assert "FARM_SECRET_KEY" in (tmp_path / "ticker-0.log").read_text()


def test_no_secret_is_in_the_log(driver, start, farm_environment, tmp_path):
    (closed,) = free_ports(1)
    process = start(REDIS_URL=f"redis://:hunter2@127.0.0.1:{closed}/0")
    wait_until(lambda: has_started(tmp_path), "a ticker")
    driver.submit()
    wait_until(lambda: driver.sql("SELECT 1 FROM outbox WHERE attempts > 0") != [], "a failed doorbell")
    assert leave(process) == 0
    text = (tmp_path / "ticker-0.log").read_text()
    secrets = [
        farm_environment[name] for name in ("FARM_SECRET_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL")
    ]
    assert not [secret for secret in ("hunter2", *secrets) if secret in text]
