"""Assets: one row and one object per picture and account, shared by videos; and reuse of finished videos."""

import io
import struct
import zlib
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.service.api.conftest import SUBMIT, Farm, image_bytes


async def upload(client: httpx.AsyncClient, data: bytes | None = None, **headers: str) -> httpx.Response:
    return await client.post("/v1/assets", files={"file": ("a.png", data or image_bytes())}, headers=headers)


async def test_same_picture_is_the_same_asset_within_its_account(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    first = (await upload(client)).json()
    second = (await upload(client)).json()
    assert first["id"] == second["id"]
    assert (first["width"], first["height"], first["refs"], first["media_type"]) == (96, 64, 0, "image/png")
    assert farm.store.head(f"v1/{farm.account_id}/in/{first['sha256']}.png").bytes == first["bytes"]
    stranger = (await upload(client, Authorization=f"Bearer {farm.new_key('other')}")).json()
    assert stranger["id"] != first["id"]


@pytest.mark.parametrize("name", ["asset_id", "file_id"])
async def test_videos_share_an_asset_and_keep_it_alive(
    client: httpx.AsyncClient, farm: Farm, name: str
) -> None:
    asset = (await upload(client)).json()
    for _ in range(2):
        video = (
            await client.post("/v1/videos", json={**SUBMIT, "input_reference": {name: asset["id"]}})
        ).json()
        assert video["has_input_reference"] is True
    shown = (await client.get(f"/v1/assets/{asset['id']}")).json()
    in_use = await client.delete(f"/v1/assets/{asset['id']}")
    assert (shown["refs"], in_use.status_code, in_use.json()["code"]) == (2, 409, "asset_in_use")
    assert farm.execute("SELECT DISTINCT input_asset_id FROM job") == [(asset["id"],)]


async def test_deleted_asset_is_gone_until_it_is_uploaded_again(client: httpx.AsyncClient) -> None:
    asset_id = (await upload(client)).json()["id"]
    deleted = await client.delete(f"/v1/assets/{asset_id}")
    assert deleted.json() == {"id": asset_id, "object": "asset.deleted", "deleted": True}
    use = await client.post("/v1/videos", json={**SUBMIT, "input_reference": {"asset_id": asset_id}})
    assert (await client.get(f"/v1/assets/{asset_id}")).status_code == 404
    assert (await client.delete(f"/v1/assets/{asset_id}")).status_code == 404
    assert (use.status_code, use.json()["errors"][0]["loc"]) == (422, "input_reference.asset_id")
    assert (await upload(client)).json()["id"] == asset_id


async def test_assets_of_two_accounts_are_apart(client: httpx.AsyncClient, farm: Farm) -> None:
    asset_id = (await upload(client)).json()["id"]
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    wanted = {**SUBMIT, "input_reference": {"asset_id": asset_id}}
    assert (await client.get(f"/v1/assets/{asset_id}", headers=stranger)).status_code == 404
    assert (await client.delete(f"/v1/assets/{asset_id}", headers=stranger)).status_code == 404
    assert (await client.post("/v1/videos", json=wanted, headers=stranger)).status_code == 422


@pytest.mark.parametrize("field", ["asset_id", "file_id"])
async def test_unknown_asset_is_named_as_the_request_spells_it(client: httpx.AsyncClient, field: str) -> None:
    answer = await client.post("/v1/videos", json={**SUBMIT, "input_reference": {field: "f"}})
    (error,) = answer.json()["errors"]
    assert error["loc"] == f"input_reference.{field}"
    assert error["msg"].startswith(f"input_reference.{field} names no asset of this account (got f)")


async def test_unknown_member_of_a_submit_is_told_which_there_are(client: httpx.AsyncClient) -> None:
    (error,) = (await client.post("/v1/videos", json={**SUBMIT, "foo": 1})).json()["errors"]
    known = error["msg"].removeprefix("field foo is not supported; there are ").split(", ")
    assert {"prompt", "seed", "priority", "webhook", "input_reference"} <= set(known)


@pytest.mark.parametrize(
    ("files", "status", "code"),
    [
        ({"file": ("a", b"GIF89a")}, 400, "invalid_image"),
        ({"image": ("a", b"x")}, 422, "invalid_field"),
        ({"file": ("a", b"x"), "other": ("b", b"x")}, 422, "invalid_field"),
        ({"file": (None, "x")}, 422, "invalid_field"),
    ],
)
async def test_what_is_no_picture_is_refused(
    client: httpx.AsyncClient, farm: Farm, files: dict, status: int, code: str
) -> None:
    answer = await client.post("/v1/assets", files=files)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert farm.execute("SELECT count(*) FROM asset") == [(0,)]


@pytest.mark.req("F-11")
async def test_repeated_upload_is_answered_as_before(client: httpx.AsyncClient) -> None:
    first, second = [await upload(client, **{"Idempotency-Key": "k"}) for _ in range(2)]
    other = await upload(client, image_bytes(size=(64, 96)), **{"Idempotency-Key": "k"})
    assert (first.text, second.headers["idempotent-replayed"]) == (second.text, "true")
    assert other.json()["code"] == "idempotency_key_reused"


EXACT = {**SUBMIT, "seed": 5, "reuse": "exact"}


async def test_identical_request_is_answered_from_the_finished_video(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    first = (await client.post("/v1/videos", json={**SUBMIT, "seed": 5})).json()
    farm.finish()
    answer = await client.post("/v1/videos", json=EXACT)
    assert (answer.json()["id"], answer.json()["status"]) == (first["id"], "completed")
    assert answer.headers["x-reused-video"] == "true"
    assert farm.num_jobs() == 1


@pytest.mark.parametrize(
    "spoil",
    [
        "UPDATE job SET result = jsonb_set(result, '{engine}', '{\"engine\": \"older\"}')",
        "UPDATE worker_group SET state = 'gone'",
        "UPDATE asset SET expires_at = now() - interval '1 second'",
        "UPDATE job SET deleted_at = now()",
    ],
)
async def test_video_of_another_engine_or_without_content_is_not_reused(
    client: httpx.AsyncClient, farm: Farm, spoil: str
) -> None:
    await client.post("/v1/videos", json={**SUBMIT, "seed": 5})
    farm.finish()
    farm.execute(spoil)
    answer = await client.post("/v1/videos", json=EXACT)
    assert (answer.json()["status"], answer.json()["reuse"]) == ("queued", "exact")
    assert "x-reused-video" not in answer.headers


async def test_only_an_identical_request_of_the_same_account_is_reused(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    await client.post("/v1/videos", json={**SUBMIT, "seed": 5})
    farm.finish()
    stranger = {"Authorization": f"Bearer {farm.new_key('other')}"}
    answers = [
        await client.post("/v1/videos", json={**EXACT, "seed": 6}),
        await client.post("/v1/videos", json={**EXACT, "num_inference_steps": 5}),
        await client.post("/v1/videos", json={**EXACT, "prompt": "another"}),
        await client.post("/v1/videos", json={**EXACT, "reuse": "off"}),
        await client.post("/v1/videos", json=EXACT, headers=stranger),
    ]
    assert {answer.json()["status"] for answer in answers} == {"queued"}


def picture(mode: str, size: tuple[int, int], kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind, **options)
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    return picture("RGB", (96, 64), "JPEG", exif=exif)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """Return a PNG that promises a size and has next to no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (64, 64), "red")]}
INTAKE = [
    ("16 bit", picture("I;16", (64, 48), "PNG"), 200, (64, 48)),
    ("CMYK", picture("CMYK", (64, 48), "JPEG"), 200, (64, 48)),
    ("EXIF", rotated(), 200, (64, 96)),
    ("truncated", picture("RGB", (64, 64), "PNG")[:60], 400, "invalid_image"),
    ("animated", picture("RGB", (64, 64), "WEBP", **FRAMES), 400, "invalid_image"),
    ("one pixel", picture("RGB", (1, 1), "PNG"), 400, "invalid_image"),
    ("20,000 pixels", bomb(20_000, 20_000), 413, "image_too_large"),
    ("many pixels", bomb(16_000, 16_000), 413, "image_too_large"),
    ("20 MiB", b"\x89PNG\r\n\x1a\n" + bytes(20 * 2**20), 413, "image_too_large"),
]


@pytest.mark.req("F-22")
async def test_every_odd_picture_has_its_documented_answer(client: httpx.AsyncClient) -> None:
    found = {}
    for name, data, _, _ in INTAKE:
        answer = await upload(client, data)
        body = answer.json()
        told = (body["width"], body["height"]) if answer.status_code == 200 else body["code"]
        found[name] = (answer.status_code, told)
    assert found == {name: (status, told) for name, _, status, told in INTAKE}
