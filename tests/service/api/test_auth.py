"""Keys, scopes, and the wall between accounts."""

from datetime import timedelta

import httpx
import pytest

from api.app import create_app
from farm.accounts import SCOPES, revoke_key
from farm.clock import now
from farm.db.session import unit_of_work
from farm.settings import Settings
from tests.service.api.conftest import SUBMIT, Farm

# Method, path, scope that it needs.
CALLS = [
    ("POST", "/v1/videos", "videos:write"),
    ("GET", "/v1/videos", "videos:read"),
    ("GET", "/v1/videos/{id}", "videos:read"),
    ("GET", "/v1/videos/{id}/content", "videos:read"),
    ("POST", "/v1/videos/{id}/cancel", "videos:cancel"),
    ("DELETE", "/v1/videos/{id}", "videos:write"),
    ("GET", "/v1/models", "videos:read"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_every_route_but_the_open_ones_wants_a_key(farm: Farm) -> None:
    app = create_app(farm.settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://farm") as nobody,
    ):
        answers = [await nobody.request(method, path.format(id="video_1")) for method, path, _ in CALLS]
        opened = [
            await nobody.get(path) for path in ("/livez", "/health", "/readyz", "/openapi.json", "/docs")
        ]
    assert {answer.status_code for answer in answers} == {401}
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}
    assert {answer.json()["error"]["type"] for answer in answers} == {"authentication_error"}
    assert {answer.status_code for answer in opened} == {200}


async def test_key_without_the_scope_is_forbidden_and_with_it_is_not(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    for method, path, scope in CALLS:
        without = farm.new_key(scopes=[other for other in SCOPES if other != scope])
        only = farm.new_key(scopes=[scope])
        url = path.format(id="video_00000000000000000000000000")
        refused = await client.request(method, url, headers=bearer(without))
        allowed = await client.request(method, url, headers=bearer(only))
        assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
        assert scope in refused.json()["detail"]
        assert allowed.status_code not in {401, 403}


async def test_key_is_also_taken_from_its_own_header(client: httpx.AsyncClient, farm: Farm) -> None:
    del client.headers["Authorization"]
    assert (await client.get("/v1/videos", headers={"X-Api-Key": farm.key})).status_code == 200
    assert (await client.get("/v1/videos")).status_code == 401


async def test_keys_that_open_nothing(client: httpx.AsyncClient, farm: Farm) -> None:
    wrong_secret = farm.key[:-8] + "00000000"
    expired = farm.new_key(expires_at=now() - timedelta(seconds=1))
    for key in ("", "x", wrong_secret, expired, farm.key + " x", "mk_live_" + "0" * 44):
        answer = await client.get("/v1/videos", headers=bearer(key))
        assert (key, answer.status_code, answer.json()["code"]) == (key, 401, "invalid_api_key")
    basic = await client.get("/v1/videos", headers={"Authorization": f"Basic {farm.key}"})
    assert basic.status_code == 401


async def test_key_for_other_addresses_is_refused(client: httpx.AsyncClient, farm: Farm) -> None:
    elsewhere = farm.new_key(cidrs=["203.0.113.0/24"])
    answer = await client.get("/v1/videos", headers=bearer(elsewhere))
    assert (answer.status_code, answer.json()["code"]) == (403, "ip_not_allowed")


async def test_revoked_key_stops_working_within_five_seconds(
    client: httpx.AsyncClient, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api.auth import CACHE_TTL_S, KeyCache

    at = [1000.0]
    real = KeyCache.__init__
    monkeypatch.setattr(KeyCache, "__init__", lambda self: real(self, lambda: at[0]))
    app = create_app(farm.settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://farm", headers=client.headers) as fresh,
    ):
        assert (await fresh.get("/v1/videos")).status_code == 200
        with unit_of_work(farm.database) as conn:
            assert revoke_key(conn, farm.account_id, farm.key.split("_")[2][:8])
        at[0] += CACHE_TTL_S
        assert (await fresh.get("/v1/videos")).status_code == 401
    assert CACHE_TTL_S <= 5


async def test_videos_of_another_account_do_not_exist(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    farm.finish()
    stranger = bearer(farm.new_key("other"))
    for method, path, _ in CALLS:
        if "{id}" in path:
            answer = await client.request(method, path.format(id=video_id), headers=stranger)
            assert (method, path, answer.status_code) == (method, path, 404)
    assert (await client.get("/v1/videos", headers=stranger)).json()["data"] == []
    assert (await client.get(f"/v1/videos?after={video_id}", headers=stranger)).status_code == 404
    assert (await client.get(f"/v1/videos/{video_id}")).json()["state"] == "succeeded"


async def test_refused_caller_is_refused_before_the_body_is_read(farm: Farm) -> None:
    app = create_app(farm.settings)

    async def receive() -> dict[str, object]:
        raise AssertionError("nothing may be read")

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/videos",
        "raw_path": b"/v1/videos",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("farm", 80),
        "scheme": "http",
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 401
    await app.state.services.close()


async def test_open_farm_on_loopback_needs_no_key(settings: Settings, farm: Farm) -> None:
    app = create_app(settings.model_copy(update={"auth": "none"}))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as anybody,
    ):
        video_id = (await anybody.post("/v1/videos", json={**SUBMIT, "priority": "high"})).json()["id"]
        assert (await anybody.get(f"http://127.0.0.1:8000/v1/videos/{video_id}")).status_code == 200
    assert farm.num_jobs() == 1


async def test_open_farm_answers_no_web_page_but_its_own(settings: Settings, farm: Farm) -> None:
    options = {"auth": "none", "cors_origins": ["https://app.example.com"]}
    app = create_app(settings.model_copy(update=options))
    transport = httpx.ASGITransport(app)
    cases = {
        ("http://localhost:8000", "http://localhost:8000"): 200,
        ("http://[::1]:8000", "https://app.example.com"): 200,
        ("http://localhost:8000", "https://evil.example.com"): 403,
        ("http://localhost:8000", "null"): 403,
        ("http://rebound.example.com:8000", None): 403,
    }
    found = {}
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as page:
        for base, origin in cases:
            headers = {"Origin": origin} if origin else {}
            files = {name: (None, str(value)) for name, value in SUBMIT.items()}
            found[base, origin] = (
                await page.post(f"{base}/v1/videos", files=files, headers=headers)
            ).status_code
    assert found == cases
    assert farm.num_jobs() == 2
