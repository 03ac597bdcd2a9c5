"""`python -m worker` as an operator runs it: from another folder, with its own environment, under signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from farm.db.session import unit_of_work
from farm.doorbell import make_celery, publish_doorbell
from farm.groups import change_profile, list_groups
from farm.jobs.states import State
from farm.profiles import load_profiles
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
    wait_until(lambda: not any(map(is_alive, family)), "the end of all that it started")


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


def test_worker_of_a_drained_group_waits_for_undrain_however_often_it_is_started(
    bench, start_worker, tmp_path
):
    state = str(tmp_path / "state-that-stays")
    worker = start_worker(FARM_STATE_DIR=state)
    group_id = bench.wait(bench.submit(), State.SUCCEEDED).group_id
    bench.wish(group_id, "draining")
    assert worker.wait() == 0
    job = bench.submit()

    worker = start_worker(FARM_STATE_DIR=state)
    wait_until(lambda: b"groups undrain" in worker.log.read_bytes(), "the wait for undrain")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert b"taken_over" not in worker.log.read_bytes()

    worker = start_worker(FARM_STATE_DIR=state)
    wait_until(lambda: b"groups undrain" in worker.log.read_bytes(), "the wait for undrain")
    assert (bench.job(job.id).state, bench.group_state(group_id)) == (State.QUEUED, "gone")
    bench.wish(group_id, None)
    assert bench.wait(job, State.SUCCEEDED).group_id == group_id


OTHER = "other-cpu"


@pytest.fixture
def two_profiles(tmp_path):
    """A file with two profiles that fit a group without devices."""
    file = tmp_path / "profiles.yaml"
    row = {"devices": 0, "default_tier": "272p", "max_tier": "272p", "default_steps": 4}
    rows = {PROFILE: row, OTHER: row}
    file.write_text(yaml.safe_dump({"deterministic": False, "auto": [PROFILE], "profiles": rows}))
    return file


def change_to(bench, group_id, file, name):
    with unit_of_work(bench.database) as conn:
        change_profile(conn, group_id, name, load_profiles(file), "admin:alice")


def test_group_finishes_its_job_and_its_process_serves_the_other_profile(bench, start_worker, two_profiles):
    worker = start_worker(FARM_PROFILES_FILE=str(two_profiles))
    job = bench.submit(chaos(step_s=0.1), steps=60)  # it still runs when the profile is changed
    bench.wait_for_step(job)
    old_id, same = bench.job(job.id).group_id, bench.submit()
    other = bench.submit(profile=OTHER)
    family = descendants(worker.process.pid)
    change_to(bench, old_id, two_profiles, OTHER)
    bench.wait(other, State.SUCCEEDED)
    assert (bench.job(job.id).state, bench.job(job.id).epoch) == (State.SUCCEEDED, 1)
    assert bench.job(same.id).state is State.QUEUED
    assert bench.group_state(old_id) == "gone"
    wait_until(lambda: not any(map(is_alive, family)), "the end of the ranks of the other profile")
    new = bench.group(bench.job(other.id).group_id)
    assert (new.profile, new.wanted_state, new.wanted_profile) == (OTHER, None, None)

    change_to(bench, new.id, two_profiles, PROFILE)
    bench.wait(same, State.SUCCEEDED)
    assert bench.job(same.id).group_id == old_id  # the folder and the id of a profile stay
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert bench.group_state(old_id) == "gone"


def test_signal_during_a_change_of_profile_ends_the_process(bench, start_worker, two_profiles):
    worker = start_worker(FARM_PROFILES_FILE=str(two_profiles))
    job = bench.submit(chaos(step_s=0.1), steps=100)
    bench.wait_for_step(job)
    group_id = bench.job(job.id).group_id
    change_to(bench, group_id, two_profiles, OTHER)
    wait_until(lambda: bench.group_state(group_id) == "draining", "the drain")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert bench.group_state(group_id) == "gone"
    with unit_of_work(bench.database) as conn:
        assert [group.profile for group in list_groups(conn)] == [PROFILE]


def test_change_that_is_taken_back_in_time_changes_nothing(bench, start_worker, two_profiles):
    start_worker(FARM_PROFILES_FILE=str(two_profiles))
    job = bench.submit(chaos(step_s=0.1), steps=60)
    bench.wait_for_step(job)
    group_id = bench.job(job.id).group_id
    change_to(bench, group_id, two_profiles, OTHER)
    wait_until(lambda: bench.group_state(group_id) == "draining", "the drain")
    bench.wish(group_id, None)
    wait_until(lambda: bench.group_state(group_id) == "busy", "the end of the drain")
    assert bench.wait(bench.submit(), State.SUCCEEDED).group_id == group_id
    assert bench.group(group_id).wanted_profile is None


def test_profile_that_the_worker_does_not_know_ends_it_with_a_reason(bench, start_worker, two_profiles):
    worker = start_worker(FARM_PROFILES_FILE=str(two_profiles))
    group_id = bench.wait(bench.submit(), State.SUCCEEDED).group_id
    file = two_profiles.with_name("api.yaml")
    file.write_text(two_profiles.read_text().replace(OTHER, "only-there"))
    change_to(bench, group_id, file, "only-there")
    assert worker.wait() == 1
    assert b"profile must be auto or one of" in worker.log.read_bytes()
    assert bench.group_state(group_id) == "gone"


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
