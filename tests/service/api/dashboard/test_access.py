"""Who may open the dashboard and change something there: sessions, roles, tokens, origins, keys."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from api.dashboard import sections
from farm import admins, groups
from farm.admins import Role
from farm.db.session import unit_of_work
from farm.groups import Group
from tests.service.api.conftest import SUBMIT, Farm

PASSWORD = "correct horse battery"
ORIGIN = {"Origin": "http://farm"}
TOKEN = re.compile(r'name="csrf" value="([^"]+)"')


def make_login(farm: Farm, name: str = "alice", role: Role = Role.ADMIN) -> None:
    with unit_of_work(farm.database) as conn:
        admins.create(conn, name, role, admins.hash_password(PASSWORD), by="system:cli")


async def log_in(client: httpx.AsyncClient, name: str = "alice", password: str = PASSWORD) -> httpx.Response:
    return await client.post("/admin/login", data={"name": name, "password": password}, headers=ORIGIN)


@asynccontextmanager
async def visitor(farm: Farm, name: str = "alice", **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Give a client that has logged in and sends no API key."""
    async with farm.client(**changes) as client:
        del client.headers["Authorization"]
        assert (await log_in(client, name)).status_code == 303
        yield client


async def token_of(client: httpx.AsyncClient) -> str:
    found = TOKEN.search((await client.get("/admin/jobs")).text)
    assert found is not None
    return found[1]


async def change(client: httpx.AsyncClient, path: str, headers: Any = ORIGIN, **form: str) -> httpx.Response:
    return await client.post(
        f"/admin/api{path}", data={"csrf": await token_of(client), **form}, headers=headers
    )


def entries(farm: Farm, action: str) -> list[Any]:
    return farm.execute("SELECT actor, target, before, after, ip FROM audit_log WHERE action = :a", a=action)


async def submitted(farm: Farm) -> str:
    async with farm.client() as client:
        return str((await client.post("/v1/videos", json=SUBMIT)).json()["id"])


@pytest.mark.req("F-50")
async def test_every_page_needs_a_login_and_leads_back_to_where_one_was(farm: Farm) -> None:
    async with farm.client() as client:
        for page in sections.PAGES:
            path = re.sub(r"{\w+}", "x", page.path)
            answer = await client.get(f"/admin{path}")
            assert (path, answer.status_code) == (path, 303)
            assert answer.headers["location"].startswith("/admin/login?next=%2Fadmin%2F")


@pytest.mark.req("F-50")
async def test_change_needs_session_token_and_own_origin(farm: Farm) -> None:
    make_login(farm)
    job_id = await submitted(farm)
    path = f"/admin/api/jobs/{job_id}/cancel"
    async with visitor(farm) as client:
        token = await token_of(client)
        refused = [
            await client.post(path, data={}, headers=ORIGIN),
            await client.post(path, data={"csrf": token[:-1] + "x"}, headers=ORIGIN),
            await client.post(path, data={"csrf": token}),
            await client.post(path, data={"csrf": token}, headers={"Origin": "null"}),
            await client.post(path, data={"csrf": token}, headers={"Origin": "https://evil.example"}),
        ]
        assert [answer.status_code for answer in refused] == [403] * 5
        assert farm.execute("SELECT state FROM job")[0].state == "queued"
        done = await client.post(path, data={"csrf": token}, headers=ORIGIN)
    assert (done.status_code, done.headers["location"]) == (303, "/admin/")
    assert farm.execute("SELECT state FROM job")[0].state == "canceled"
    async with farm.client() as client:
        del client.headers["Authorization"]
        stranger = await client.post(path, data={"csrf": token}, headers=ORIGIN)
        browser = await client.post(path, headers={**ORIGIN, "Accept": "text/html,*/*;q=0.8"})
        reader = await client.get("/admin/api/overview")
    for answer in (stranger, reader):
        assert (answer.status_code, answer.json()["code"]) == (401, "invalid_api_key")
        assert answer.headers["content-type"] == "application/problem+json"
    assert (browser.status_code, browser.headers["location"]) == (303, "/admin/login")


@pytest.mark.req("F-50")
async def test_nothing_changes_on_get(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        for route in sections.CHANGES:
            assert route.methods == {"POST"}
            path = re.sub(r"{\w+}", "x", route.path)
            answer = await client.get(f"/admin{path}")
            assert answer.status_code in {404, 405}


@pytest.mark.req("F-50")
async def test_roles_bound_what_a_login_may_do(farm: Farm) -> None:
    for role in Role:
        make_login(farm, str(role), role)
    job_id = await submitted(farm)
    async with visitor(farm, "viewer") as client:
        assert (await change(client, f"/jobs/{job_id}/cancel")).status_code == 403
        assert (await client.get("/admin/audit")).status_code == 403
    async with visitor(farm, "operator") as client:
        assert (await change(client, f"/accounts/{farm.account_id}/suspend")).status_code == 403
        assert (await change(client, f"/jobs/{job_id}/cancel")).status_code == 303
    async with visitor(farm, "admin") as client:
        assert (await change(client, f"/accounts/{farm.account_id}/suspend")).status_code == 303
    assert farm.execute("SELECT status FROM account")[0].status == "suspended"


@pytest.mark.req("F-50")
async def test_login_tries_are_bounded_per_address_and_name(farm: Farm) -> None:
    make_login(farm)
    async with farm.client() as client:
        answers = [await log_in(client, "alice", "wrong wrong wrong") for _ in range(6)]
        other = await log_in(client, "bob", "wrong wrong wrong")
    assert [answer.status_code for answer in answers] == [401] * 5 + [429]
    assert other.status_code == 401


@pytest.mark.req("F-50")
async def test_login_tells_nothing_apart(farm: Farm) -> None:
    make_login(farm)
    make_login(farm, "closed")
    with unit_of_work(farm.database) as conn:
        admins.set_enabled(conn, "closed", is_enabled=False, by="system:cli")
    async with farm.client() as client:
        answers = [
            await log_in(client, "alice", "wrong wrong wrong"),
            await log_in(client, "nobody"),
            await log_in(client, "closed"),
        ]
    said = [re.sub(r'value="\w+"', "", answer.text) for answer in answers]
    assert {answer.status_code for answer in answers} == {401}
    assert len(set(said)) == 1
    assert not any("set-cookie" in answer.headers for answer in answers)


@pytest.mark.req("F-50")
async def test_login_form_of_another_site_is_refused(farm: Farm) -> None:
    make_login(farm)
    async with farm.client() as client:
        form = {"name": "alice", "password": PASSWORD}
        foreign = await client.post("/admin/login", data=form, headers={"Origin": "https://evil.example"})
        silent = await client.post("/admin/login", data=form)
        away = await client.post(
            "/admin/login", data={**form, "next": "https://evil.example/"}, headers=ORIGIN
        )
    assert (foreign.status_code, silent.status_code) == (403, 403)
    assert away.headers["location"] == "/admin/"


@pytest.mark.req("F-50")
async def test_cookie_is_for_us_alone(farm: Farm) -> None:
    make_login(farm)
    async with farm.client() as client:
        plain = (await log_in(client)).headers["set-cookie"]
    async with farm.client(public_base_url="https://farm.example") as client:
        sealed = (await log_in(client)).headers["set-cookie"]
    for cookie in (plain, sealed):
        assert all(part in cookie for part in ("HttpOnly", "SameSite=lax", "Path=/admin", "Max-Age=28800"))
    assert "Secure" not in plain
    assert "Secure" in sealed


@pytest.mark.req("F-50")
async def test_answers_forbid_scripts_of_others_frames_and_copies(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        answers = [await client.get(path) for path in ("/admin/", "/admin/login", "/admin/nothing")]
        style = await client.get("/admin/static/style.css")
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "max-age" in style.headers["cache-control"]


@pytest.mark.req("F-50")
async def test_admin_key_needs_no_token_and_only_works_with_its_scope(farm: Farm) -> None:
    job_id = await submitted(farm)
    path = f"/admin/api/jobs/{job_id}/cancel"
    reader = farm.new_key(scopes=["admin:read"])
    writer = farm.new_key(scopes=["admin:write"])
    async with farm.client() as client:
        assert (await client.post(path)).status_code == 403
    async with farm.client(key=reader) as client:
        assert (await client.post(path)).json()["code"] == "insufficient_scope"
        assert (await client.get("/admin/api/overview")).json()["profiles"][0]["queued"] == 1
        assert (await client.get("/admin/")).status_code == 303
    async with farm.client(key=writer) as client:
        done = await client.post(path, json={})
        twice = await client.post(path, json={})
    assert (done.status_code, done.json()["state"]) == (200, "canceled")
    assert (twice.status_code, twice.json()["code"]) == (409, "already_finished")
    [entry] = entries(farm, "job.cancel")
    assert entry.actor == f"key:{writer.split('_')[2]}"


@pytest.mark.req("F-50")
async def test_closed_login_and_smaller_role_are_felt_at_once(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        with unit_of_work(farm.database) as conn:
            admins.change_role(conn, "alice", Role.VIEWER, by="admin:bob")
        assert (await change(client, "/profiles/tiny-cpu/pause")).status_code == 403
        with unit_of_work(farm.database) as conn:
            admins.set_enabled(conn, "alice", is_enabled=False, by="admin:bob")
        assert (await client.get("/admin/jobs")).status_code == 303


async def test_session_takes_a_new_cookie_once_in_a_while(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        before = client.cookies["magi2_admin"]
        farm.execute("UPDATE admin_session SET rotated_at = rotated_at - interval '20 minutes'")
        # What hands no cookie out takes no new id: it would be lost, and the session with it.
        assert (await client.get("/admin/api/overview")).status_code == 200
        assert (await client.get("/admin/jobs/video_0/files/video")).status_code == 404
        assert (await client.get("/admin/jobs/video_0")).status_code == 404
        assert (await client.post("/admin/api/jobs/video_0/cancel", headers=ORIGIN)).status_code == 403
        assert client.cookies["magi2_admin"] == before
        assert farm.execute("SELECT former_id FROM admin_session")[0].former_id is None
        answer = await client.get("/admin/jobs")
        assert answer.status_code == 200
        assert client.cookies["magi2_admin"] != before
        assert (await client.get("/admin/jobs")).status_code == 200


async def test_dashboard_can_be_switched_off(farm: Farm) -> None:
    off = farm.settings.admin.model_copy(update={"enabled": False})
    async with farm.client(admin=off) as client:
        assert (await client.get("/admin/login")).status_code == 404


async def test_oversized_and_broken_forms_are_refused(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        large = await client.post("/admin/api/accounts", data={"name": "x" * 70_000}, headers=ORIGIN)
        kind = {**ORIGIN, "Content-Type": "text/xml"}
        strange = await client.post("/admin/api/accounts", content=b"<a/>", headers=kind)
        bytes_kind = {**ORIGIN, "Content-Type": "application/json"}
        broken = await client.post("/admin/api/accounts", content=b"\xff{", headers=bytes_kind)
    assert (large.status_code, strange.status_code, broken.status_code) == (413, 415, 400)


@pytest.mark.req("F-50")
async def test_what_changes_is_written_down_with_before_and_after(farm: Farm) -> None:
    make_login(farm)
    job_id, account = await submitted(farm), f"/accounts/{farm.account_id}"
    async with visitor(farm) as client:
        for path, form in (
            (f"/jobs/{job_id}/priority", {"by": "2"}),
            (f"/jobs/{job_id}/quarantine", {"note": "looks odd"}),
            (f"/jobs/{job_id}/release", {}),
            (f"/jobs/{job_id}/retry", {"priority": "-3", "new_seed": "on"}),
            ("/profiles/tiny-cpu/pause", {"reason": "maintenance"}),
            ("/profiles/tiny-cpu/resume", {}),
            ("/profiles/tiny-cpu/limit", {"max_queued": "7"}),
            ("/profiles/dlo-dp4/waves", {"wave_size": "3", "wave_max_wait_s": "5", "wave_fill": "wait"}),
            ("/groups/g1/pause", {}),
            ("/groups/g1/undrain", {}),
            (f"{account}/limits", {"max_running": "2"}),
            (f"{account}/suspend", {}),
            (f"{account}/resume", {}),
            ("/jobs/bulk", {"do": "cancel", "state": "queued"}),
            (f"/jobs/{job_id}/delete", {}),
        ):
            answer = await change(client, path, **form)
            assert (path, answer.status_code, "magi2_admin_said=!" in str(answer.headers)) == (
                path,
                303,
                False,
            )
            assert "%21" not in answer.headers["set-cookie"].split(";")[0]
    rows = farm.execute("SELECT action, actor, before, after, ip FROM audit_log WHERE actor = 'admin:alice'")
    found = {row.action: row for row in rows}
    assert found["job.priority"].before["priority"] == 0
    assert found["job.priority"].after["priority"] == 2
    assert found["job.retry"].after["priority"] == -3
    assert found["profile.pause"].after == {"paused": True, "reason": "maintenance"}
    assert found["profile.limit"].after == {"max_queued": 7}
    assert found["group.pause"].after["wanted_state"] == "paused"
    assert found["account.limits"].after == {"max_running": 2}
    assert found["account.suspend"].before == {"status": "active"}
    assert found["job.delete"].after["deleted_at"] is not None
    assert {row.ip for row in rows} == {"127.0.0.1"}


async def test_waiting_job_moves_to_a_profile_that_takes_it(farm: Farm) -> None:
    make_login(farm)
    job_id = await submitted(farm)
    async with visitor(farm) as client:
        moved = await change(client, f"/jobs/{job_id}/reroute", profile="layerwise-1gpu")
        assert moved.status_code == 303
        [row] = farm.execute("SELECT profile, exec_timeout_s, gpus, seq FROM job")
        assert (row.profile, row.gpus, row.seq) == ("layerwise-1gpu", 1, 2)
        farm.execute("""UPDATE job SET params = jsonb_set(params, '{tier}', '"540p"')""")
        await change(client, f"/jobs/{job_id}/reroute", profile="tiny-cpu")
        shown = await client.get("/admin/queue")
    assert "Not done." in shown.text
    assert farm.execute("SELECT profile FROM job")[0].profile == "layerwise-1gpu"
    [entry] = entries(farm, "job.reroute")
    assert (entry.before["profile"], entry.after["profile"]) == ("tiny-cpu", "layerwise-1gpu")


@pytest.mark.req("F-50")
async def test_group_is_asked_for_another_profile_that_fits_by_an_operator(farm: Farm) -> None:
    make_login(farm, "olga", Role.OPERATOR)
    make_login(farm, "victor", Role.VIEWER)
    with unit_of_work(farm.database) as conn:
        groups.register(conn, Group("g4", "host-4", "sp4", "0,1,2,3", "boot-4"))
    path, form = "/groups/g4/profile", {"profile": "dlo-sp4", "back": "/admin/groups"}
    wish = "SELECT wanted_state, wanted_profile FROM worker_group WHERE id = 'g4'"
    async with visitor(farm, "victor") as client:
        assert path not in (await client.get("/admin/groups")).text
        assert (await change(client, path, **form)).status_code == 403
    async with visitor(farm, "olga") as client:
        shown = (await client.get("/admin/groups")).text
        offered = re.findall("<option>([^<]+)</option>", shown)
        assert set(offered) == {"dlo-sp4", "dlo-dp4", "dlo-dp2sp2"}  # of four devices, for this group only
        assert (await client.post(f"/admin/api{path}", data=form, headers=ORIGIN)).status_code == 403
        assert (await client.get(f"/admin/api{path}")).status_code == 405
        await change(client, path, **{**form, "profile": "layerwise-1gpu"})
        assert "runs on 1 devices, and group g4 has 4" in (await client.get("/admin/groups")).text
        assert farm.execute(wish) == [(None, None)]
        await change(client, path, **form)
        assert farm.execute(wish) == [("changing", "dlo-sp4")]
        assert "asked: changing to dlo-sp4" in (await client.get("/admin/groups")).text
        await change(client, "/groups/g4/undrain")
        assert farm.execute(wish) == [(None, None)]
    [entry] = entries(farm, "group.profile")
    assert (entry.actor, entry.target) == ("admin:olga", "g4")
    assert (entry.before, entry.after) == (
        {"profile": "sp4", "wanted_state": None},
        {"profile": "dlo-sp4", "wanted_state": "changing"},
    )


async def test_refused_change_says_why_and_writes_nothing(farm: Farm) -> None:
    make_login(farm)
    job_id = await submitted(farm)
    async with visitor(farm) as client:
        answer = await change(client, f"/jobs/{job_id}/retry", back=f"/admin/jobs/{job_id}")
        assert answer.headers["location"] == f"/admin/jobs/{job_id}"
        shown = await client.get(answer.headers["location"])
        assert "only failed, canceled and expired jobs can be retried" in shown.text
        again = await client.get(answer.headers["location"])
        assert "Not done." not in again.text
    assert entries(farm, "job.retry") == []


async def test_suspended_account_is_refused_and_its_key_revoked_at_once(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client, farm.client() as user:
        assert (await user.get("/v1/videos")).status_code == 200
        key_id = farm.key.split("_")[2]
        assert (await change(client, f"/keys/{key_id}/revoke")).status_code == 303
    async with farm.client() as user:
        assert (await user.get("/v1/videos")).status_code == 401
    with farm.database.connect() as conn:
        assert conn.execute(text("SELECT revoked_at IS NOT NULL FROM api_key")).scalar_one()
