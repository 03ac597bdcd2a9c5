"""What every answer has, whatever was asked: ids, errors without secrets, HEAD, and the open endpoints."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError

from api import deps, readiness
from api.app import create_app
from farm.settings import Settings
from farm.storage import ObjectStore, StorageError
from tests.service.api.conftest import ROOT, SUBMIT, Farm

AWAY = "postgresql+psycopg://farm@127.0.0.1:1/none"


async def test_every_answer_has_a_request_id_and_a_good_one_is_kept(client: httpx.AsyncClient) -> None:
    for path in ("/livez", "/v1/videos", "/nothing", "/v1/videos/x"):
        made = await client.get(path)
        kept = await client.get(path, headers={"X-Request-Id": "abc_DEF-12345"})
        assert re.fullmatch(r"req_[0-9a-z]{26}", made.headers["x-request-id"])
        assert kept.headers["x-request-id"] == "abc_DEF-12345"
    for bad in ("short", "x" * 65, "a b c d e f", "ab\tcdefgh", "<script>"):
        answer = await client.get("/livez", headers={"X-Request-Id": bad})
        assert answer.headers["x-request-id"] != bad


@pytest.mark.req("F-10")
async def test_unknown_paths_and_methods_answer_in_the_one_form(client: httpx.AsyncClient) -> None:
    unknown = await client.get("/v1/nothing")
    later = [
        await client.post(f"/v1/videos{path}", json={}) for path in ("/video_1/retry", "/video_1/cancel")
    ]
    method = await client.put("/v1/videos", json={})
    options = await client.options("/v1/videos")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
    assert unknown.headers["content-type"] == "application/problem+json"
    assert {answer.status_code for answer in later} <= {404, 405}
    assert (method.status_code, method.json()["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "GET, HEAD, POST"
    assert options.status_code == 405


async def test_head_works_wherever_get_does(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    farm.finish()
    paths = ["/livez", "/readyz", "/v1/models", "/v1/videos", f"/v1/videos/{video_id}", "/nothing"]
    for path in [*paths, f"/v1/videos/{video_id}/content", "/openapi.json"]:
        get, head = await client.get(path), await client.head(path)
        assert (path, head.status_code, head.content) == (path, get.status_code, b"")
        assert head.headers.get("content-type") == get.headers.get("content-type")


@pytest.fixture
def secrets_of(farm: Farm) -> list[str]:
    """Words that no answer may hold: hosts, paths, SQL, keys."""
    url = sqlalchemy.make_url(farm.settings.database_url)
    words = [
        str(url.database),
        str(url.password),
        str(farm.settings.s3_endpoint_url),
        farm.key,
        farm.store._bucket,
    ]
    return [*words, "SELECT", "Traceback", "psycopg", str(ROOT), "site-packages", ".py"]


@pytest.mark.req("F-10")
async def test_crash_answers_500_without_any_detail(
    farm: Farm, secrets_of: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError(f"{farm.settings.database_url} SELECT prompt FROM job")

    monkeypatch.setattr("api.views.list_jobs", crash)
    app = create_app(farm.settings)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app):
        client = httpx.AsyncClient(
            transport=transport, base_url="http://farm", headers={"Authorization": f"Bearer {farm.key}"}
        )
        answer = await client.get("/v1/videos")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert [word for word in secrets_of if word in answer.text] == []
    assert "request_crashed" in capsys.readouterr().out


async def test_database_that_is_away_answers_503_with_a_time(
    settings: Settings, secrets_of: list[str], farm: Farm
) -> None:
    app = create_app(settings.model_copy(update={"database_url": AWAY}))
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": f"Bearer {farm.key}"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://farm", headers=headers) as client,
    ):
        answers = [await client.get("/v1/videos"), await client.post("/v1/videos", json=SUBMIT)]
        alive = await client.get("/livez")
        ready = await client.get("/readyz")
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (503, "no_database")
        assert int(answer.headers["retry-after"]) >= 1
        assert [word for word in [*secrets_of, "127.0.0.1"] if word in answer.text] == []
    assert alive.status_code == 200
    assert (ready.status_code, ready.json()["checks"]["database"]) == (503, "unreachable")
    assert "127.0.0.1" not in ready.text


async def test_ready_farm_says_so(client: httpx.AsyncClient) -> None:
    answer = await client.get("/readyz")
    expected = {"database": "ok", "schema": "ok", "object_store": "ok"}
    assert answer.json() == {"status": "ready", "checks": expected, "degraded": []}


async def test_farm_without_redis_is_ready_but_degraded(settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"}))
    answer = await _ask(app, "/readyz")
    assert (answer.status_code, answer.json()["degraded"]) == (200, ["redis"])


async def test_farm_without_its_store_is_not_ready(settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"s3_endpoint_url": "http://127.0.0.1:1"}))
    answer = await _ask(app, "/readyz")
    assert (answer.status_code, answer.json()["checks"]["object_store"]) == (503, "unreachable")
    assert answer.headers["retry-after"] == "10"


@pytest.mark.req("F-21")
@pytest.mark.parametrize(
    ("offset_s", "status", "degraded"),
    [(31, 200, ["clock"]), (-31, 200, ["clock"]), (301, 503, []), (29, 200, [])],
)
async def test_clock_of_the_store_is_compared(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, offset_s: float, status: int, degraded: list[str]
) -> None:
    monkeypatch.setattr(ObjectStore, "clock_offset_s", lambda _: offset_s)
    answer = await _ask(create_app(settings), "/readyz")
    assert (answer.status_code, answer.json()["degraded"]) == (status, degraded)


@pytest.mark.parametrize(
    ("revision", "status", "degraded"), [("0000_before", 503, []), ("9999_after", 200, ["schema_is_newer"])]
)
async def test_schema_of_another_release(
    settings: Settings, farm: Farm, revision: str, status: int, degraded: list[str]
) -> None:
    farm.execute("UPDATE alembic_version SET version_num = :revision", revision=revision)
    answer = await _ask(create_app(settings), "/readyz")
    assert (answer.status_code, answer.json()["degraded"]) == (status, degraded)


async def test_database_that_was_never_migrated_is_not_ready(
    settings: Settings, new_database: Callable[[str], str]
) -> None:
    url = new_database("template1").replace("postgresql://", "postgresql+psycopg://")
    answer = await _ask(create_app(settings.model_copy(update={"database_url": url})), "/readyz")
    assert (answer.status_code, answer.json()["checks"]["schema"]) == (503, "run the migrations")


async def test_checks_run_once_in_ten_seconds_however_many_ask(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    at = [1000.0]

    def counted(_: ObjectStore) -> float:
        rounds.append(1)
        raise StorageError

    monkeypatch.setattr(ObjectStore, "clock_offset_s", counted)
    monkeypatch.setattr(readiness, "monotonic_s", lambda: at[0])
    probe = readiness.ReadinessProbe(deps.make_services(settings))
    for _ in range(5):
        assert (await probe.answer()).status == "not_ready"
    at[0] += readiness.CACHE_S
    await probe.answer()
    assert len(rounds) == 2
    await probe._services.close()


async def test_process_that_is_being_stopped_is_not_ready(settings: Settings) -> None:
    app = create_app(settings)
    app.state.services.is_stopping = lambda: True
    answer = await _ask(app, "/readyz")
    assert (answer.status_code, answer.json()["checks"]["process"]) == (503, "draining")


async def _ask(app: Any, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://farm") as client,
    ):
        return await client.get(path)


async def test_models_list_every_limit_and_each_profile(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    profiles = {profile["name"]: profile for profile in model["profiles"]}
    tiny = profiles["tiny-cpu"]
    assert model["id"] == "magi-2-preview"
    assert model["limits"]["sizes"] == {"272p": "448x256", "540p": "896x512"}
    assert model["limits"]["num_inference_steps"] == {"min": 1, "max": 200}
    assert model["limits"]["prompt"] == {"max_characters": 60_000, "max_tokens": 7_000}
    assert (tiny["is_live"], tiny["engine"]) == (True, {"engine": "test"})
    assert (tiny["max_resolution"], tiny["default_num_inference_steps"], tiny["max_num_inference_steps"]) == (
        "272p",
        4,
        20,
    )
    assert any(not profile["is_live"] for profile in profiles.values())


async def test_description_names_every_route_and_body(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    operations = {
        f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    }
    assert operations >= {
        "POST /v1/videos",
        "GET /v1/videos",
        "GET /v1/videos/{video_id}",
        "DELETE /v1/videos/{video_id}",
        "PATCH /v1/videos/{video_id}",
        "POST /v1/videos/{video_id}/cancel",
        "POST /v1/videos/{video_id}/retry",
        "GET /v1/videos/{video_id}/content",
        "GET /v1/models",
        "GET /livez",
        "GET /readyz",
    }
    bodies = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    assert set(bodies) == {"application/json", "multipart/form-data"}
    assert "prompt" in json.dumps(bodies)


async def test_cors_is_off_unless_origins_are_named(settings: Settings) -> None:
    preflight = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    results = []
    for origins in ([], ["https://app.example.com"]):
        app = create_app(settings.model_copy(update={"cors_origins": origins}))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://farm") as client,
        ):
            answer = await client.options("/v1/videos", headers=preflight)
            error = await client.get("/v1/videos", headers={"Origin": "https://app.example.com"})
        results.append(
            (
                answer.status_code,
                answer.headers.get("access-control-allow-origin"),
                error.status_code,
                error.headers.get("access-control-allow-origin"),
            )
        )
    allowed = "https://app.example.com"
    assert results == [(405, None, 401, None), (200, allowed, 401, allowed)]


async def test_lost_connection_of_the_database_is_no_crash(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise OperationalError("SELECT 1", {}, Exception("server closed the connection"))

    monkeypatch.setattr("api.views.list_jobs", lost)
    answer = await client.get("/v1/videos")
    assert (answer.status_code, answer.json()["code"]) == (503, "no_database")
