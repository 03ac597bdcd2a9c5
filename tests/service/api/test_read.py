"""Reading videos: the object through its life, tags, long polls, and pages without skips or repeats."""

import asyncio
from datetime import timedelta

import httpx
import pytest

from farm.clock import now
from farm.db.session import unit_of_work
from farm.jobs.lifecycle import beat, fail
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from tests.service.api.conftest import CLIP, CONDITIONING, SUBMIT, Farm


async def submit(client: httpx.AsyncClient, **members: object) -> str:
    answer = await client.post("/v1/videos", json={**SUBMIT, **members})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def get(client: httpx.AsyncClient, video_id: str, **headers: str) -> httpx.Response:
    return await client.get(f"/v1/videos/{video_id}", headers=headers)


async def test_running_video_shows_phase_step_and_progress(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    claimed = farm.start()
    with unit_of_work(farm.database) as conn:
        assert beat(conn, video_id, claimed.epoch, "g1", Progress("denoise", 2, 4))
    answer = await get(client, video_id)
    video = answer.json()
    expected = {
        "status": "in_progress",
        "state": "running",
        "phase": "denoise",
        "step": 2,
        "total_steps": 4,
        "attempt": 1,
        "group": "g1",
        "queue_position": None,
        "finished_at": None,
        "error": None,
    }
    assert {name: video[name] for name in expected} == expected
    assert 5 < video["progress"] < 90
    assert answer.headers["openai-poll-after-ms"] == "2000"
    assert answer.headers["retry-after"] == "2"


async def test_finished_video_shows_its_file_its_times_and_its_conditioning(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    video_id = await submit(client)
    farm.finish()
    answer = await get(client, video_id)
    video = answer.json()
    expected = {
        "status": "completed",
        "state": "succeeded",
        "progress": 100,
        "phase": None,
        "error": None,
        "media_type": "video/mp4",
        "bytes": len(CLIP),
        "stage_durations": {"denoise": 1.5},
        "peak_memory_mb": 12.5,
        "conditioning": CONDITIONING,
        "video": {"width": 448, "height": 256, "frames": 125, "fps": 12.5, "duration_s": 10.0},
        "audio": {"sample_rate": 44100, "channels": 2, "duration_s": 10.0},
        "eta_s": None,
    }
    assert {name: video[name] for name in expected} == expected
    assert len(video["sha256"]) == 64
    assert video["completed_at"] >= video["created_at"]
    assert video["expires_at"] - video["completed_at"] == pytest.approx(7 * 86400, abs=5)
    assert video["urls"]["content"].endswith(f"/v1/videos/{video_id}/content")
    assert video["queue_time_s"] >= 0
    assert "openai-poll-after-ms" not in answer.headers


@pytest.mark.req("F-16")
async def test_failed_video_is_answered_with_200_and_its_error(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    claimed = farm.start()
    failure = Failure(FailureKind.INVALID_INPUT, "prompt is 9000 tokens; at most 7000 are supported")
    with unit_of_work(farm.database) as conn:
        assert fail(conn, video_id, claimed.epoch, failure)
    answer = await get(client, video_id)
    video = answer.json()
    assert answer.status_code == 200
    assert (video["status"], video["state"], video["completed_at"]) == ("failed", "failed", None)
    assert video["error"]["code"] == "invalid_input"
    assert video["finished_at"] is not None


@pytest.mark.req("F-16")
async def test_expired_video_is_failed_for_clients_of_openai(client: httpx.AsyncClient, farm: Farm) -> None:
    from farm.jobs.lifecycle import expire_queued

    video_id = await submit(client)
    farm.execute("UPDATE job SET queue_deadline = now() - interval '1 s'")
    with unit_of_work(farm.database) as conn:
        assert expire_queued(conn) == 1
    answer = await get(client, video_id)
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["state"]) == ("failed", "expired")
    assert answer.json()["error"]["code"] in {"expired", "profile_unavailable"}


async def test_queue_position_counts_those_ahead(client: httpx.AsyncClient) -> None:
    ids = [await submit(client) for _ in range(3)]
    urgent = await submit(client, priority="high")
    positions = [(await get(client, video_id)).json()["queue_position"] for video_id in [urgent, *ids]]
    assert positions == [1, 2, 3, 4]
    page = (await client.get("/v1/videos?order=asc")).json()
    assert [video["queue_position"] for video in page["data"]] == [2, 3, 4, 1]


async def test_entity_tag_follows_the_events_of_the_job(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    first = await get(client, video_id)
    tag = first.headers["etag"]
    same = await get(client, video_id, **{"If-None-Match": f'"x", W/{tag}'})
    farm.start()
    changed = await get(client, video_id, **{"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


async def test_long_poll_returns_when_the_state_changes(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    waiting = asyncio.create_task(client.get(f"/v1/videos/{video_id}", params={"wait": 60}))
    await asyncio.sleep(0.7)
    assert not waiting.done()
    await asyncio.to_thread(farm.start)
    answer = await asyncio.wait_for(waiting, 30)
    assert answer.json()["state"] in {"starting", "running"}


async def test_long_poll_ends_after_its_time(client: httpx.AsyncClient) -> None:
    video_id = await submit(client)
    answer = await asyncio.wait_for(client.get(f"/v1/videos/{video_id}", params={"wait": 1}), 30)
    assert answer.json()["state"] == "queued"


async def test_long_poll_for_a_tag_that_is_old_already_returns_at_once(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    video_id = await submit(client)
    tag = (await get(client, video_id)).headers["etag"]
    farm.start()
    poll = client.get(f"/v1/videos/{video_id}", params={"wait": 60}, headers={"If-None-Match": tag})
    assert (await asyncio.wait_for(poll, 30)).json()["state"] == "running"


async def test_long_poll_of_a_finished_video_returns_at_once(client: httpx.AsyncClient, farm: Farm) -> None:
    video_id = await submit(client)
    farm.finish()
    poll = client.get(f"/v1/videos/{video_id}", params={"wait": 60})
    assert (await asyncio.wait_for(poll, 30)).json()["state"] == "succeeded"


async def test_long_polls_hold_no_connection_of_the_database(client: httpx.AsyncClient) -> None:
    """More waiters than the pool has connections, and others are still served."""
    video_id = await submit(client)
    waiting = [
        asyncio.create_task(client.get(f"/v1/videos/{video_id}", params={"wait": 2})) for _ in range(40)
    ]
    await asyncio.sleep(0.2)
    assert (await asyncio.wait_for(get(client, video_id), 30)).status_code == 200
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


@pytest.mark.parametrize("wait", ["-1", "61", "x", "1.5"])
async def test_wait_out_of_range_is_refused(client: httpx.AsyncClient, wait: str) -> None:
    answer = await client.get(f"/v1/videos/{await submit(client)}", params={"wait": wait})
    assert (answer.status_code, answer.json()["code"], answer.json()["errors"][0]["loc"]) == (
        422,
        "invalid_field",
        "wait",
    )


@pytest.mark.parametrize(
    "video_id",
    ["video_", "x", "video_00000000000000000000000000", "%00", "video_%00", "a" * 4000, "é", "..%2f"],
)
async def test_unknown_id_is_not_found(client: httpx.AsyncClient, video_id: str) -> None:
    for answer in (await get(client, video_id), await client.delete(f"/v1/videos/{video_id}")):
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


class TestList:
    """`GET /v1/videos`."""

    async def test_page_has_the_shape_of_openai(self, client: httpx.AsyncClient) -> None:
        empty = (await client.get("/v1/videos")).json()
        ids = [await submit(client) for _ in range(2)]
        page = (await client.get("/v1/videos")).json()
        assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        assert [video["id"] for video in page["data"]] == ids[::-1]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[1], ids[0], False)

    @pytest.mark.req("F-17")
    @pytest.mark.parametrize("order", ["asc", "desc"])
    async def test_pages_skip_and_repeat_nothing_while_videos_are_added(
        self, client: httpx.AsyncClient, farm: Farm, order: str
    ) -> None:
        there = [await submit(client) for _ in range(7)]
        # Equal times are the hard case for a keyset.
        farm.execute("UPDATE job SET created_at = date_trunc('second', created_at)")
        seen: list[str] = []
        params: dict[str, str] = {"limit": "2", "order": order}
        while True:
            page = (await client.get("/v1/videos", params=params)).json()
            seen += [video["id"] for video in page["data"]]
            if not page["has_more"]:
                break
            there.append(await submit(client))
            params["after"] = page["last_id"]
            assert len(seen) < 50
        assert len(seen) == len(set(seen))
        # Newest first, later arrivals lie before the first page; oldest first, they are met at the end.
        assert set(seen) == (set(there) if order == "asc" else set(there[:7]))

    async def test_filters_choose(self, client: httpx.AsyncClient, farm: Farm) -> None:
        done = await submit(client, user="u1", metadata={"project": "fox", "take": "1"})
        farm.finish()
        waiting = await submit(client, user="u2", metadata={"project": "fox", "take": "2"})
        farm.execute("UPDATE job SET created_at = created_at - interval '1 day' WHERE id = :id", id=done)
        yesterday = str(int((now() - timedelta(hours=12)).timestamp()))
        cases = {
            ("status=completed",): [done],
            ("status=queued",): [waiting],
            ("state=succeeded", "status=completed"): [done],
            ("user=u2",): [waiting],
            ("metadata[project]=fox",): [waiting, done],
            ("metadata[project]=fox", "metadata[take]=1"): [done],
            ("metadata[project]=cat",): [],
            ("profile=tiny-cpu",): [waiting, done],
            ("profile=sp4",): [],
            (f"created_after={yesterday}",): [waiting],
            (f"created_before={yesterday}",): [done],
        }
        found = {}
        for case in cases:
            page = (await client.get("/v1/videos?" + "&".join(case))).json()
            found[case] = [video["id"] for video in page["data"]]
        assert found == cases

    async def test_finished_videos_in_a_page_show_their_file(
        self, client: httpx.AsyncClient, farm: Farm
    ) -> None:
        await submit(client)
        farm.finish()
        (video,) = (await client.get("/v1/videos")).json()["data"]
        assert video["bytes"] == len(CLIP)

    async def test_parameters_that_mean_nothing_are_refused(self, client: httpx.AsyncClient) -> None:
        refused = []
        for query in (
            "limit=0",
            "limit=101",
            "limit=x",
            "order=up",
            "state=done",
            "status=done",
            "page=2",
            "batch_id=a&batch_id=b",
            "user=a&user=b",
            "user=%00",
            "metadata[a%00]=b",
            "metadata=x",
            "created_after=yesterday",
            "created_after=99999999999999999999",
            "state=queued&status=completed",
        ):
            answer = await client.get(f"/v1/videos?{query}")
            refused.append((query, answer.status_code, answer.json()["code"]))
        assert [entry for entry in refused if entry[1:] != (422, "invalid_field")] == []

    @pytest.mark.req("F-17")
    async def test_unknown_cursor_is_not_found_rather_than_an_empty_page(
        self, client: httpx.AsyncClient
    ) -> None:
        for after in ("video_00000000000000000000000000", "x", "%00"):
            assert (await client.get(f"/v1/videos?after={after}")).status_code in {404, 422}
        assert (await client.get("/v1/videos?after=video_00000000000000000000000000")).status_code == 404


async def test_eta_appears_once_the_profile_has_finished_a_clip(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    first = (await client.post("/v1/videos", json=SUBMIT)).json()
    farm.finish()
    second = (await client.post("/v1/videos", json=SUBMIT)).json()
    assert first["eta_s"] is None
    assert second["eta_s"] > 0
