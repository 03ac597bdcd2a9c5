"""`/metrics` on real servers: the whole table, what moves count, what the database says, and who may read."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from farm.db.session import unit_of_work
from farm.jobs.job import Claimed
from farm.jobs.lifecycle import beat, fail, mark_running, reap_leases
from farm.jobs.policy import Failure, FailureKind
from farm.metrics.families import REGISTRY
from farm.settings import MetricsSettings
from tests.metric_table import TABLE
from tests.service.api.conftest import PROFILE, SUBMIT, Farm

TOKEN = "scrape-token-0123456789"
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(farm: Farm) -> Values:
    async with farm.client() as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    return values_in(answer.text)


def values_in(text: str) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(values: Values, name: str, **labels: str) -> float:
    return values.get((name, tuple(sorted(labels.items()))), 0.0)


def kinds_in(text: str) -> Iterator[tuple[str, str]]:
    for family in text_string_to_metric_families(text):
        yield (f"{family.name}_total" if family.type == "counter" else family.name), family.type


async def test_scrape_has_every_metric_of_the_table_and_no_other(farm: Farm) -> None:
    async with farm.client() as client:
        text = (await client.get("/metrics")).text
    found = {name: kind for name, kind in kinds_in(text) if not name.endswith("_created")}
    assert found == {name: kind for name, (kind, _) in TABLE.items()}


async def test_samples_carry_the_labels_of_the_table_and_no_other(farm: Farm) -> None:
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT)
        farm.finish()
        text = (await client.get("/metrics")).text
    seen = set()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                seen.add(name)
                assert set(sample.labels) - {"le"} == set(TABLE[name][1]), sample
    assert {"magi2_jobs", "magi2_group_up", "magi2_e2e_seconds", "magi2_http_requests_total"} <= seen


async def test_a_finished_job_is_counted_at_each_of_its_stations(farm: Farm) -> None:
    before = values_in_process()
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT)
        waiting = await scrape(farm)
        farm.finish()
        after = await scrape(farm)

    assert one(waiting, "magi2_jobs", profile=PROFILE, state="queued") == 1
    assert one(after, "magi2_jobs", profile=PROFILE, state="queued") == 0

    def grew(name: str, **labels: str) -> float:
        return one(after, name, **labels) - one(before, name, **labels)

    sized = {"profile": PROFILE, "resolution": "272p"}
    for name in ("queue_wait", "render", "upload", "e2e", "step"):
        assert grew(f"magi2_{name}_seconds_count", **sized) == 1, name
    assert grew("magi2_phase_seconds_sum", profile=PROFILE, phase="denoise") == pytest.approx(1.5)
    assert grew("magi2_step_seconds_sum", **sized) == pytest.approx(1.5 / 4)
    assert grew("magi2_attempts_total", profile=PROFILE) == 1
    assert grew("magi2_jobs_finished_total", profile=PROFILE, outcome="succeeded", error_code="") == 1
    assert grew("magi2_submit_seconds_count", outcome="accepted") == 1
    route = {"route": "/v1/videos", "method": "POST", "status_class": "2xx"}
    assert grew("magi2_http_requests_total", **route) == 1
    assert grew("magi2_http_request_seconds_count", **route) == 1


async def test_lost_leases_stale_writes_and_failures_are_counted(farm: Farm) -> None:
    before = values_in_process()
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT)
    claimed = farm.start()
    farm.execute("UPDATE job SET lease_until = now() - interval '1 second'")
    with unit_of_work(farm.database) as conn:
        assert reap_leases(conn) == 1
    with unit_of_work(farm.database) as conn:
        assert not mark_running(conn, claimed.job.id, claimed.epoch)
    again = farm.start()
    with unit_of_work(farm.database) as conn:
        fail(conn, again.job.id, again.epoch, Failure(FailureKind.INVALID_INPUT, message="no"))
    after = await scrape(farm)
    for name in ("lease_lost", "fenced_writes"):
        grown = one(after, f"magi2_{name}_total", profile=PROFILE) - one(
            before, f"magi2_{name}_total", profile=PROFILE
        )
        assert grown == 1, name
    failed = {"profile": PROFILE, "outcome": "failed", "error_code": "invalid_input"}
    assert (
        one(after, "magi2_jobs_finished_total", **failed) - one(before, "magi2_jobs_finished_total", **failed)
        == 1
    )


async def test_a_move_that_is_rolled_back_is_not_counted(farm: Farm) -> None:
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT)
    before = values_in_process()

    claimed = farm.claim()
    with pytest.raises(ZeroDivisionError):
        fail_and_break(farm, claimed)
    with unit_of_work(farm.database) as conn:
        assert beat(conn, claimed.job.id, claimed.epoch, "g1", None) is not None
    after = values_in_process()
    failed = {"profile": PROFILE, "outcome": "failed", "error_code": "invalid_input"}
    assert one(after, "magi2_jobs_finished_total", **failed) == one(
        before, "magi2_jobs_finished_total", **failed
    )


async def test_a_silent_group_is_down_and_loses_its_series_after_a_while(farm: Farm) -> None:
    labels = {"group": "g1", "profile": PROFILE}
    assert one(await scrape(farm), "magi2_group_up", **labels) == 1
    farm.execute("UPDATE worker_group SET heartbeat_at = now() - interval '31 seconds'")
    silent = await scrape(farm)
    key = ("magi2_group_up", tuple(sorted(labels.items())))
    assert silent[key] == 0
    farm.execute("UPDATE worker_group SET state = 'gone', heartbeat_at = now() - interval '16 minutes'")
    assert key not in await scrape(farm)


async def test_what_a_group_says_of_itself_is_shown(farm: Farm) -> None:
    stats = (
        '{"restarts": 2, "busy_1h": 0.25, "devices": [{"memory_used_bytes": 100, "utilization_percent": 50},'
        ' {"memory_used_bytes": 50, "utilization_percent": 100}]}'
    )
    farm.execute(f"UPDATE worker_group SET stats = '{stats}'")
    values = await scrape(farm)
    labels = {"group": "g1", "profile": PROFILE}
    assert one(values, "magi2_group_restarts_total", **labels) == 2
    assert one(values, "magi2_group_busy_ratio", **labels) == 0.25
    assert one(values, "magi2_gpu_memory_bytes", **labels) == 150
    assert one(values, "magi2_gpu_utilization", **labels) == 0.75


async def test_outbox_and_webhooks_are_read_from_their_rows(farm: Farm) -> None:
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT)
    farm.execute("UPDATE outbox SET created_at = now() - interval '100 seconds'")
    values = await scrape(farm)
    assert one(values, "magi2_outbox_unsent") == 1
    assert one(values, "magi2_outbox_oldest_age_seconds") >= 100


async def test_paths_that_nobody_serves_and_odd_methods_make_no_new_series(farm: Farm) -> None:
    async with farm.client() as client:
        await client.get("/v1/videos-of-mine/17")
        await client.request("PURGE", "/v1/videos")
    text = str(sorted(await scrape(farm)))
    assert "videos-of-mine" not in text
    assert "PURGE" not in text


async def test_without_a_token_only_this_host_may_read_and_no_proxy(farm: Farm) -> None:
    async with farm.client() as client:
        client._transport.client = ("10.1.2.3", 1)
        assert (await client.get("/metrics")).status_code == 401
    async with farm.client() as client:
        answer = await client.get("/metrics", headers={"X-Forwarded-For": "127.0.0.1"})
    assert answer.status_code == 401


async def test_a_token_opens_it_from_anywhere_and_is_needed_everywhere(farm: Farm) -> None:
    guarded = MetricsSettings(token=SecretStr(TOKEN))
    async with farm.client(metrics=guarded) as client:
        client._transport.client = ("10.1.2.3", 1)
        assert (await client.get("/metrics")).status_code == 401  # an API key is no token
        opened = await client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert opened.status_code == 200


def fail_and_break(farm: Farm, claimed: Claimed) -> None:
    with unit_of_work(farm.database) as conn:
        fail(conn, claimed.job.id, claimed.epoch, Failure(FailureKind.INVALID_INPUT, message="no"))
        raise ZeroDivisionError


def values_in_process() -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
    }
