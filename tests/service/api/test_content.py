"""Content: links to the store, and bytes through the api with ranges."""

import hashlib
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from farm.db.session import unit_of_work
from farm.jobs.lifecycle import fail
from farm.jobs.policy import Failure, FailureKind
from tests.service.api.conftest import CLIP, SUBMIT, Farm

DIGEST = hashlib.sha256(CLIP).hexdigest()


@pytest.fixture
async def finished(client: httpx.AsyncClient, farm: Farm) -> str:
    video_id = str((await client.post("/v1/videos", json=SUBMIT)).json()["id"])
    farm.finish()
    return video_id


async def streamed(client: httpx.AsyncClient, video_id: str, **headers: str) -> httpx.Response:
    return await client.get(f"/v1/videos/{video_id}/content?redirect=false", headers=headers)


@pytest.mark.req("F-21")
async def test_link_downloads_the_clip_under_a_safe_name(client: httpx.AsyncClient, finished: str) -> None:
    answer = await client.get(f"/v1/videos/{finished}/content")
    assert (answer.status_code, answer.content, answer.headers["cache-control"]) == (302, b"", "no-store")
    link = answer.headers["location"]
    assert parse_qs(urlsplit(link).query)["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    async with httpx.AsyncClient() as outsider:
        file = await outsider.get(link)
    assert file.content == CLIP
    assert file.headers["content-disposition"] == f'attachment; filename="{finished}.mp4"'
    assert file.headers["content-type"] == "video/mp4"


async def test_changed_link_opens_nothing(client: httpx.AsyncClient, finished: str) -> None:
    link = (await client.get(f"/v1/videos/{finished}/content")).headers["location"]
    async with httpx.AsyncClient() as outsider:
        assert (await outsider.get(link.replace("video.mp4", "meta.json"))).status_code == 403
        assert (await outsider.get(link.split("?")[0])).status_code == 403


@pytest.mark.req("F-21")
def test_link_is_signed_for_the_public_endpoint(farm: Farm) -> None:
    from farm.storage import ObjectStore

    public = farm.settings.model_copy(update={"s3_public_endpoint_url": "https://files.example.com"})
    link = ObjectStore(public).presign("v1/a", 60, "a.mp4", "video/mp4")
    assert link.startswith("https://files.example.com/farm/")
    assert parse_qs(urlsplit(link).query)["X-Amz-Expires"] == ["60"]


async def test_stream_carries_the_whole_clip_with_its_digest_as_tag(
    client: httpx.AsyncClient, finished: str
) -> None:
    answer = await streamed(client, finished)
    assert (answer.status_code, answer.content) == (200, CLIP)
    expected = {
        "etag": f'"{DIGEST}"',
        "accept-ranges": "bytes",
        "content-length": str(len(CLIP)),
        "content-type": "video/mp4",
        "content-disposition": f'attachment; filename="{finished}.mp4"',
    }
    assert {name: answer.headers[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=100-199", 100, 199),
        ("bytes=10000-", 10000, 10239),
        ("bytes=-1", 10239, 10239),
    ],
)
async def test_one_range_is_served(
    client: httpx.AsyncClient, finished: str, header: str, start: int, end: int
) -> None:
    answer = await streamed(client, finished, Range=header)
    assert (answer.status_code, answer.content) == (206, CLIP[start : end + 1])
    assert answer.headers["content-range"] == f"bytes {start}-{end}/{len(CLIP)}"


async def test_other_range_headers(client: httpx.AsyncClient, finished: str) -> None:
    many = await streamed(client, finished, Range="bytes=0-1,3-4")
    outside = await streamed(client, finished, Range=f"bytes={len(CLIP)}-")
    stale = await streamed(client, finished, **{"Range": "bytes=0-1", "If-Range": '"other"'})
    fresh = await streamed(client, finished, **{"Range": "bytes=0-1", "If-Range": f'"{DIGEST}"'})
    assert (many.status_code, len(many.content)) == (200, len(CLIP))
    assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{len(CLIP)}")
    assert outside.json()["code"] == "range_not_satisfiable"
    assert (stale.status_code, fresh.status_code) == (200, 206)


async def test_known_tag_is_not_sent_again(client: httpx.AsyncClient, finished: str) -> None:
    answer = await streamed(client, finished, **{"If-None-Match": f'"{DIGEST}"'})
    assert (answer.status_code, answer.content) == (304, b"")


async def test_head_tells_the_size_without_reading_the_store(
    client: httpx.AsyncClient, finished: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farm.storage import ObjectStore

    monkeypatch.setattr(ObjectStore, "open_range", None)
    answer = await client.head(
        f"/v1/videos/{finished}/content?redirect=false", headers={"Range": "bytes=0-9"}
    )
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (206, "10", b"")


async def test_variants(client: httpx.AsyncClient, finished: str) -> None:
    metadata = await client.get(f"/v1/videos/{finished}/content?variant=metadata&redirect=false")
    missing = await client.get(f"/v1/videos/{finished}/content?variant=thumbnail")
    later = await client.get(f"/v1/videos/{finished}/content?variant=subtitles")
    assert (metadata.json(), metadata.headers["content-type"]) == ({"seed": 1}, "application/json")
    assert missing.status_code == 404
    assert (later.status_code, later.json()["errors"][0]["loc"]) == (422, "variant")


async def test_unfinished_video_has_no_content_and_says_its_state(client: httpx.AsyncClient) -> None:
    video_id = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    answer = await client.get(f"/v1/videos/{video_id}/content")
    assert (answer.status_code, answer.json()["code"], answer.json()["state"]) == (
        409,
        "not_finished",
        "queued",
    )


async def test_expired_content_is_gone(client: httpx.AsyncClient, farm: Farm, finished: str) -> None:
    farm.age(finished, timedelta(days=8))
    by_time = await client.get(f"/v1/videos/{finished}/content")
    assert (by_time.status_code, by_time.json()["code"]) == (410, "content_expired")
    assert (await client.get(f"/v1/videos/{finished}")).status_code == 200


async def test_object_that_is_missing_in_the_store_is_gone_too(
    client: httpx.AsyncClient, farm: Farm, finished: str
) -> None:
    (row,) = farm.execute("SELECT key FROM asset WHERE kind = 'video'")
    farm.store.delete(row.key)
    assert (await streamed(client, finished)).status_code == 410


@pytest.mark.req("F-20")
async def test_only_the_epoch_of_the_asset_row_is_given_out(
    client: httpx.AsyncClient, farm: Farm, finished: str
) -> None:
    (row,) = farm.execute("SELECT key FROM asset WHERE kind = 'video'")
    farm.store.put(row.key.replace("/e1/", "/e2/"), b"of another attempt", "video/mp4")
    assert (await streamed(client, finished)).content == CLIP


@pytest.mark.parametrize(
    ("variant", "media_type", "name", "data"),
    [
        ("spritesheet", "image/jpeg", "-sprite.jpg", b"tiles"),
        ("audio", "audio/wav", ".wav", b"RIFF"),
        ("metadata", "application/json", ".json", b'{"seed": 1}'),
    ],
)
async def test_each_variant_is_its_own_object(
    client: httpx.AsyncClient, finished: str, variant: str, media_type: str, name: str, data: bytes
) -> None:
    answer = await client.get(f"/v1/videos/{finished}/content?variant={variant}&redirect=false")
    assert (answer.content, answer.headers["content-type"]) == (data, media_type)
    assert answer.headers["content-disposition"] == f'attachment; filename="{finished}{name}"'


@pytest.mark.req("F-21")
async def test_url_is_a_link_that_ends_when_it_says(client: httpx.AsyncClient, finished: str) -> None:
    answer = (await client.get(f"/v1/videos/{finished}/url?ttl=60")).json()
    assert parse_qs(urlsplit(answer["url"]).query)["X-Amz-Expires"] == ["60"]
    async with httpx.AsyncClient() as outsider:
        assert (await outsider.get(answer["url"])).content == CLIP
    for ttl in (59, 86_401):
        assert (await client.get(f"/v1/videos/{finished}/url?ttl={ttl}")).status_code == 422


async def test_url_of_what_is_not_there(client: httpx.AsyncClient, farm: Farm, finished: str) -> None:
    waiting = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    farm.age(finished, timedelta(days=8))
    answers = [await client.get(f"/v1/videos/{video}/url") for video in (waiting, finished, "video_1")]
    assert [answer.status_code for answer in answers] == [409, 410, 404]


@pytest.mark.req("F-03")
async def test_timeline_tells_everything_but_what_is_for_operators(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    video_id = (await client.post("/v1/videos", json=SUBMIT)).json()["id"]
    claimed = farm.start()
    with unit_of_work(farm.database) as conn:
        failure = Failure(FailureKind.ENGINE_ERROR, "private words", {"path": "private"})
        assert fail(conn, video_id, claimed.epoch, failure)
    answer = await client.get(f"/v1/videos/{video_id}/timeline")
    told = answer.json()
    assert [event["seq"] for event in told["events"]] == list(range(1, len(told["events"]) + 1))
    assert [event["type"] for event in told["events"]][:3] == ["queued", "starting", "running"]
    [attempt] = told["attempts"]
    assert (attempt["outcome"], attempt["error_code"], attempt["group"]) == ("requeued", "engine_error", "g1")
    assert "private" not in answer.text
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    for path in ("timeline", "url", "content"):
        assert (await client.get(f"/v1/videos/{video_id}/{path}", headers=stranger)).status_code == 404
