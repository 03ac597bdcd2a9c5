"""The short form of T-08 (100 jobs), and that the oracle of the storm sees every breach."""

from dataclasses import dataclass

import pytest
import redis

from farm.jobs import lifecycle
from farm.jobs.job import NewAsset
from farm.jobs.lifecycle import Result
from farm.jobs.states import State
from farm.storage import output_key
from tests.chaos.ends import stored_keys
from tests.chaos.invariants import NAMES, PRESIGNED, Traces, breaches, sample_leases
from tests.chaos.storm import Plan, Storm
from tests.service.conftest import S3Place
from tests.service.driver import Driver
from worker.group_folder import ProcessMark

SHORT = Plan(
    jobs=100,
    seed=1,
    apis=2,
    tickers=1,
    workers=2,
    submits_per_s=50,
    longest_s=0.4,
    lease_s=9,
    heartbeat_s=1,
    timeout_s=900,
)


@pytest.mark.timeout(1200)
@pytest.mark.req("F-02")
@pytest.mark.req("F-40")
@pytest.mark.req("F-41")
def test_no_job_is_lost_doubled_or_told_twice_in_a_storm():
    report = Storm(SHORT).run()
    assert report.is_clean, report.to_json()
    assert report.kills["worker"] >= 1
    assert len(report.outages) == 5


@dataclass
class Scene:
    """A farm at rest with one finished job, and everything that the oracle looks at."""

    driver: Driver
    store: object
    broker: redis.Redis
    s3: S3Place
    traces: Traces

    def found(self):
        listed = stored_keys(self.s3)
        all_found = breaches(self.driver.engine, self.store, self.broker, listed, self.traces)
        return {name for name in NAMES if all_found[name]}

    def sql(self, statement):
        self.driver.sql(statement)


@pytest.fixture
def scene(database, object_store, redis_url, s3, tmp_path):
    driver = Driver(database)
    driver.sql(
        "INSERT INTO webhook_endpoint (id, account_id, url, event_types)"
        " VALUES ('we_1', :id, 'https://hooks.example/', :types)",
        id=driver.account,
        types=["video.completed"],
    )
    driver.sql("ALTER TABLE job DISABLE TRIGGER USER")
    log = tmp_path / "worker.log"
    log.write_text("nothing of interest")
    traces = Traces(secrets={"a key": "mk_live_secret"}, logs=[log])
    with redis.Redis.from_url(redis_url) as broker:
        scene = Scene(driver, object_store, broker, s3, traces)
        finish(scene)
        yield scene


def finish(scene):
    """Bring a job to its end, with a real object."""
    job = scene.driver.reach(State.UPLOADING)
    key = output_key(job.account_id, job.id, 1, "video.mp4", job.created_at)
    stored = scene.store.put(key, b"a clip", "video/mp4")
    video = NewAsset("video", key, stored.bytes, stored.sha256, "video/mp4")
    assert scene.driver.run(lifecycle.succeed, job.id, 1, Result({}, [video]))
    scene.traces.accepted.add(job.id)


def lose_a_job(scene):
    scene.traces.accepted.add("video_that_was_lost")


def skip_a_number(scene):
    scene.sql("UPDATE job_event SET seq = seq + 5 WHERE type = 'succeeded'")


def win_twice(scene):
    scene.sql("DROP INDEX ux_job_attempt_succeeded")
    columns = "group_id, worker_boot_id, profile, queued_at, started_at, ended_at, outcome"
    scene.sql(
        f"INSERT INTO job_attempt (job_id, epoch, {columns}) SELECT job_id, 2, {columns} FROM job_attempt"
    )


def change_an_object(scene):
    (key,) = (row.key for row in scene.driver.sql("SELECT key FROM asset"))
    scene.store.put(key, b"another", "video/mp4")


def leave_an_object(scene):
    scene.store.put("v1/left/behind.mp4", b"garbage", "video/mp4")


def miscount(scene):
    scene.sql("UPDATE account_usage SET running = running + 1")


def forget_a_message(scene):
    scene.sql("DELETE FROM webhook_delivery")


def tell_what_did_not_happen(scene):
    scene.sql("UPDATE webhook_message SET seq = 99")


def go_back_an_epoch(scene):
    scene.sql("UPDATE job_event SET epoch = 0 WHERE type = 'succeeded'")


def lose_an_attempt(scene):
    scene.sql("UPDATE job_attempt SET epoch = 7")


def leave_a_job_alone(scene):
    job = scene.driver.reach(State.RUNNING)
    scene.driver.age(job.id, lease_until="46 seconds")
    sample_leases(scene.driver.engine, scene.traces)


def leave_a_process(scene):
    scene.traces.dead.add(ProcessMark.of(1))


def leave_a_key(scene):
    scene.broker.set("magi2:left", "for ever")


def write_a_secret(scene):
    scene.traces.logs[0].write_text("a request of mk_live_secret")


def write_a_link(scene):
    scene.traces.logs[0].write_text(f"https://store/clip?{PRESIGNED}0123")


def store_a_secret(scene):
    scene.sql("""UPDATE job_event SET data = '{"key": "mk_live_secret"}'""")


def test_oracle_finds_nothing_where_nothing_is_wrong(scene):
    assert scene.found() == set()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("I1", lose_a_job),
        ("I2", skip_a_number),
        ("I3", win_twice),
        ("I4", change_an_object),
        ("I5", leave_an_object),
        ("I6", miscount),
        ("I7", forget_a_message),
        ("I7", tell_what_did_not_happen),
        ("I8", go_back_an_epoch),
        ("I8", lose_an_attempt),
        ("I9", leave_a_job_alone),
        ("I10", leave_a_process),
        ("I11", leave_a_key),
        ("I12", write_a_secret),
        ("I12", write_a_link),
        ("I12", store_a_secret),
    ],
)
def test_oracle_sees_every_breach(scene, name, damage):
    damage(scene)
    assert name in scene.found()
