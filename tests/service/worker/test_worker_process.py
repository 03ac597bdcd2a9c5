"""`python -m worker` as an operator runs it: from another folder, with its own environment, under signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farm.doorbell import make_celery, publish_doorbell
from farm.jobs.states import State
from tests.service.worker.harness import PROFILE, chaos, descendants, is_alive, wait_until

ROOT = Path(__file__).parents[3]
NEEDED = (
    "DATABASE_URL",
    "REDIS_URL",
    "S3_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "FARM_S3_BUCKET",
    "FARM_S3_PREFIX",
    "FARM_S3_REGION",
)


def test_agent_process_never_imports_torch():
    heavy = "{'torch', 'kernels', 'transformers', 'diffusers'}"
    code = f"import sys, worker.__main__, worker.agent; sys.exit(bool({heavy} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.req("F-42")
def test_worker_shares_nothing_with_the_api_but_the_three_servers(
    bench, settings, farm_environment, start_worker, tmp_path
):
    own = {name: farm_environment[name] for name in NEEDED}
    home = tmp_path / "another-host"
    home.mkdir()
    own |= {"HOME": str(home), "TMPDIR": str(home), "MAGI2_TESTING": "1", "PYTHONPATH": str(ROOT)}
    before = {path for path in tmp_path.rglob("*") if home not in path.parents}
    worker = start_worker(only=own, FARM_STATE_DIR=str(home / "state"))
    job = bench.submit()
    publish_doorbell(make_celery(settings), job.id, PROFILE)
    bench.wait(job, State.SUCCEEDED)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    after = {path for path in tmp_path.rglob("*") if home not in path.parents}
    assert {path.name for path in after - before} <= {worker.log.name, worker.log.parent.name}


def test_sigterm_ends_an_idle_worker_and_all_that_it_started(bench, start_worker):
    worker = start_worker()
    bench.wait(bench.submit(), State.SUCCEEDED)
    family = descendants(worker.process.pid)
    assert family
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert not any(is_alive(pid) for pid in family)


def test_first_signal_finishes_the_job_and_the_second_gives_it_back(bench, start_worker):
    worker = start_worker()
    short = bench.submit(chaos(step_s=0.1), steps=20)
    bench.wait_for_step(short)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert bench.job(short.id).state == State.SUCCEEDED

    worker = start_worker()
    long = bench.submit(chaos(step_s=1), steps=20)
    bench.wait_for_step(long)
    worker.send(signal.SIGINT)
    wait_until(lambda: b"drain" in worker.log.read_bytes(), "the drain")
    worker.send(signal.SIGINT)
    assert worker.wait() == 0
    assert (bench.job(long.id).state, bench.job(long.id).preemptions) == (State.QUEUED, 1)


def test_worker_finds_work_without_a_broker(bench, start_worker):
    worker = start_worker(REDIS_URL="redis://127.0.0.1:1/0")
    bench.wait(bench.submit(), State.SUCCEEDED)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_worker_starts_with_every_name_of_the_engine_set(bench, start_worker, tmp_path):
    start_worker(
        MAGI2_CKPT_ROOT=str(tmp_path),
        MAGI2_DETERMINISTIC="0",
        MAGI2_FLASH_ATTN_VERSION="2",
        MAGI2_TESTING="1",
        MAGI2_PIP_ARGS="--quiet",
        MAGI2_VALKEY_BIN="/nowhere/valkey",
        MAGI2_POSTGRES_BIN="/nowhere/postgres",
        MAGI2_WEED_BIN="/nowhere/weed",
    )
    bench.wait(bench.submit(), State.SUCCEEDED)


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("--profile", "sp5"), {}, "did you mean sp4?"),
        (("--devices", "0,1"), {}, "profile tiny-cpu runs on 0 devices"),
        (("--devices", "0,a"), {}, "devices must be numbers"),
        ((), {"MAGI2_DETERMINISTIC": "maybe"}, "MAGI2_DETERMINISTIC"),
        ((), {"FARM_WORKER__LEASE": "4"}, "FARM_WORKER__LEASE_S"),
    ],
)
def test_worker_that_cannot_start_says_why_in_one_sentence(start_worker, arguments, environment, sentence):
    worker = start_worker("--engine", "chaos", *arguments, **environment)
    assert worker.wait() == 1
    text = worker.log.read_text()
    assert sentence in text
    assert "Traceback" not in text
