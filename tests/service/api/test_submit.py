"""`POST /v1/videos`: what is accepted in which spelling, and that a refusal leaves nothing behind."""

import asyncio
import base64
import json
import threading
from typing import Any

import httpx
import pytest

from farm.secretbox import unseal
from tests.service.api.conftest import SUBMIT, Farm, image_bytes

DATA_URL = "data:image/png;base64," + base64.b64encode(image_bytes()).decode()


async def test_text_request_is_queued_and_answered_in_full(client: httpx.AsyncClient, farm: Farm) -> None:
    answer = await client.post(
        "/v1/videos", json={**SUBMIT, "seed": 42, "metadata": {"a": "b"}, "user": "u1"}
    )
    assert answer.status_code == 200
    video = answer.json()
    assert answer.headers["location"] == f"/v1/videos/{video['id']}"
    expected = {
        "object": "video",
        "model": "magi-2-preview",
        "status": "queued",
        "state": "queued",
        "progress": 0,
        "completed_at": None,
        "expires_at": None,
        "seconds": "10",
        "size": "448x256",
        "prompt": SUBMIT["prompt"],
        "error": None,
        "remixed_from_video_id": None,
        "queue_position": 1,
        "attempt": 0,
        "max_attempts": 3,
        "profile": "tiny-cpu",
        "priority": 0,
        "seed": 42,
        "num_frames": 125,
        "fps": 12.5,
        "resolution": "272p",
        "total_steps": 4,
        "has_input_reference": False,
        "metadata": {"a": "b"},
        "user": "u1",
        "batch_id": None,
        "expires_in": 86400,
        "acceleration": "off",
        "deterministic": False,
        "conditioning": None,
        "webhook": None,
    }
    assert {name: video[name] for name in expected} == expected
    assert farm.num_jobs() == 1


async def test_seed_that_was_not_given_is_drawn_stored_and_returned(client: httpx.AsyncClient) -> None:
    first = (await client.post("/v1/videos", json=SUBMIT)).json()
    again = (await client.get(f"/v1/videos/{first['id']}")).json()
    assert first["seed"] == again["seed"] >= 0


async def test_defaults_come_from_the_profile_with_a_notice(client: httpx.AsyncClient) -> None:
    video = (await client.post("/v1/videos", json={"prompt": "a fox"})).json()
    assert (video["resolution"], video["total_steps"]) == ("272p", 4)
    assert any("num_inference_steps" in notice for notice in video["notices"])


@pytest.mark.req("F-14")
@pytest.mark.parametrize(
    "form",
    [
        {
            "extra_params[resolution]": "272p",
            "extra_params[output_width]": "640",
            "extra_params[output_height]": "360",
        },
        {"extra_params": '{"resolution": "272p", "output_width": 640, "output_height": "360"}'},
        {"resolution": "272p", "output_width": "640", "output_height": "360"},
    ],
)
async def test_multipart_spellings_mean_the_same(client: httpx.AsyncClient, form: dict[str, str]) -> None:
    files = {name: (None, value) for name, value in {"prompt": "a fox", "seconds": "10", **form}.items()}
    video = (await client.post("/v1/videos", files=files)).json()
    assert (video["resolution"], video["video"]["width"], video["video"]["height"]) == ("272p", 640, 360)


@pytest.mark.req("F-14")
@pytest.mark.parametrize("extra", [{"resolution": "272p"}, '{"resolution": "272p"}'])
async def test_json_spellings_mean_the_same(client: httpx.AsyncClient, extra: object) -> None:
    answer = await client.post("/v1/videos", json={"prompt": "a fox", "extra_params": extra})
    assert answer.json()["resolution"] == "272p"


@pytest.mark.req("F-14")
async def test_two_spellings_of_one_field_are_refused(client: httpx.AsyncClient, farm: Farm) -> None:
    files = [
        ("prompt", (None, "a fox")),
        ("extra_params", (None, '{"resolution": "272p"}')),
        ("extra_params[resolution]", (None, "272p")),
    ]
    answer = await client.post("/v1/videos", files=files)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == "extra_params"
    assert farm.num_jobs() == 0


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "files": {
                "prompt": (None, "a fox"),
                "input_reference": ("../../x.png", image_bytes(), "image/png"),
            }
        },
        {"files": {"prompt": (None, "a fox"), "input_reference": ("x", image_bytes("JPEG"), "text/plain")}},
        {"files": {"prompt": (None, "a fox"), "input_reference[image_url]": (None, DATA_URL)}},
        {
            "files": {
                "prompt": (None, "a fox"),
                "input_reference": (None, json.dumps({"image_url": DATA_URL})),
            }
        },
        {"json": {"prompt": "a fox", "input_reference": {"image_url": DATA_URL}}},
        {"json": {"prompt": "a fox", "input_reference": json.dumps({"image_url": DATA_URL})}},
    ],
)
async def test_image_may_come_in_every_spelling(
    client: httpx.AsyncClient, farm: Farm, spelling: dict[str, Any]
) -> None:
    answer = await client.post("/v1/videos", **spelling)
    assert answer.json()["has_input_reference"] is True
    (row,) = farm.execute(
        "SELECT key, sha256, bytes, width, height, media_type FROM asset WHERE kind = 'input'"
    )
    stored = farm.store.head(row.key)
    assert (stored.bytes, stored.sha256) == (row.bytes, row.sha256)
    assert (row.width, row.height, row.media_type) == (96, 64, "image/png")
    assert row.key == f"v1/{farm.account_id}/in/{row.sha256}.png"


async def test_same_image_is_stored_once_for_two_jobs(client: httpx.AsyncClient, farm: Farm) -> None:
    for _ in range(2):
        await client.post("/v1/videos", json={"prompt": "a fox", "input_reference": {"image_url": DATA_URL}})
    assert farm.execute("SELECT count(DISTINCT input_asset_id), count(*) FROM job")[0] == (1, 2)


@pytest.mark.req("F-15")
async def test_all_problems_of_a_request_are_reported_at_once(client: httpx.AsyncClient, farm: Farm) -> None:
    files = [
        ("prompt", (None, " ")),
        ("seconds", (None, "5")),
        ("style", (None, "noir")),
        ("priority", (None, "urgent")),
        ("profile", (None, "warp")),
        ("webhook[url]", (None, "http://example.com/")),
        ("input_reference", ("a.gif", b"GIF89a", "image/gif")),
    ]
    answer = await client.post("/v1/videos", files=files)
    body = answer.json()
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [entry["type"] for entry in body["errors"]] == [
        "prompt_missing",
        "seconds_unsupported",
        "field_unsupported",
        "image_undecodable",
        "invalid_field",
        "invalid_field",
        "invalid_field",
    ]
    assert {entry["loc"] for entry in body["errors"]} >= {"style", "priority", "profile", "webhook.url"}
    assert farm.num_jobs() == 0


@pytest.mark.req("F-10")
async def test_error_body_serves_both_worlds(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/videos", json={"prompt": "a fox", "seconds": 5})
    request_id = answer.headers["x-request-id"]
    message = "seconds must be 10; MAGI-2 Preview makes 10-second clips only (got 5)"
    assert answer.json() == {
        "type": "urn:magi2:error:unsupported_duration",
        "title": "Unsupported duration",
        "status": 422,
        "detail": message,
        "instance": request_id,
        "code": "unsupported_duration",
        "errors": [{"loc": "seconds", "msg": message, "type": "seconds_unsupported"}],
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "seconds",
            "code": "unsupported_duration",
        },
    }


BROKEN_RULES: list[tuple[dict[str, Any], int, str]] = [
    ({"size": "1280x720"}, 422, "unsupported_size"),
    ({"size": "wide"}, 422, "unsupported_size"),
    ({"width": 448}, 422, "unsupported_size"),
    ({"resolution": "1080p"}, 422, "unsupported_size"),
    ({"size": "448x256", "resolution": "540p"}, 422, "unsupported_size"),
    ({"num_frames": 120}, 422, "unsupported_num_frames"),
    ({"fps": 24}, 422, "unsupported_fps"),
    ({"deterministic": True}, 422, "deterministic_mismatch"),
    ({"num_inference_steps": 21}, 422, "profile_limit"),
    ({"resolution": "540p"}, 422, "profile_limit"),
    ({"acceleration": "cache_dit"}, 422, "profile_limit"),
    ({"n": 2}, 422, "invalid_field"),
    ({"negative_prompt": "blurry"}, 422, "invalid_field"),
    ({"prompt": "a\0b"}, 422, "invalid_field"),
    ({"prompt": None}, 422, "invalid_field"),
    ({"metadata": {"a": "\0"}}, 422, "invalid_field"),
    ({"seed": -1}, 422, "invalid_field"),
    ({"execution_timeout_s": 10**6}, 422, "invalid_field"),
    ({"video": "x"}, 422, "invalid_field"),
    ({"input_reference": {"image_url": "data:image/png;base64,AAAA"}}, 400, "invalid_image"),
    ({"input_reference": {"image_url": "data:image/png,AAAA"}}, 400, "invalid_image"),
    ({"input_reference": {"image_url": "data:image/png;base64,%%%"}}, 400, "invalid_image"),
    ({"input_reference": {"image_url": "https://example.com/a.png"}}, 422, "invalid_field"),
    ({"task": "image-to-video"}, 422, "invalid_field"),
]


@pytest.mark.req("F-15")
async def test_broken_rules_answer_their_codes_and_write_nothing(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    found = []
    for members, _, _ in BROKEN_RULES:
        answer = await client.post("/v1/videos", json={"prompt": "a fox", **members})
        found.append((members, answer.status_code, answer.json()["code"]))
    assert found == BROKEN_RULES
    assert farm.execute("SELECT count(*) FROM job UNION ALL SELECT count(*) FROM asset") == [(0,), (0,)]


@pytest.mark.req("F-22")
async def test_images_of_a_wrong_size_answer_their_own_status(client: httpx.AsyncClient) -> None:
    tiny = await _submit_image(client, image_bytes(size=(31, 64)))
    long = await _submit_image(client, image_bytes(size=(1500, 100)))
    huge = await _submit_image(client, b"\x89PNG\r\n\x1a\n" + bytes(20 * 1024 * 1024))
    assert [(answer.status_code, answer.json()["code"]) for answer in (tiny, long, huge)] == [
        (400, "invalid_image"),
        (400, "invalid_image"),
        (413, "image_too_large"),
    ]
    assert tiny.json()["errors"][0]["type"] == "image_too_small"
    assert long.json()["errors"][0]["type"] == "image_aspect"


async def _submit_image(client: httpx.AsyncClient, data: bytes) -> httpx.Response:
    files = {"prompt": (None, "a fox"), "input_reference": ("a.png", data, "image/png")}
    return await client.post("/v1/videos", files=files)


async def test_two_images_are_one_too_many(client: httpx.AsyncClient) -> None:
    image = ("a.png", image_bytes(), "image/png")
    files = [("prompt", (None, "a fox")), ("input_reference", image), ("input_reference", image)]
    answer = await client.post("/v1/videos", files=files)
    assert (answer.status_code, answer.json()["errors"][0]["type"]) == (422, "image_count")


async def test_video_file_as_reference_is_refused_by_name(client: httpx.AsyncClient) -> None:
    files = {"prompt": (None, "a fox"), "input_reference": ("a.mp4", b"....ftyp", "video/mp4")}
    answer = await client.post("/v1/videos", files=files)
    assert answer.json()["errors"][0]["type"] == "media_unsupported"


async def test_file_in_another_field_is_refused(client: httpx.AsyncClient) -> None:
    files = {"prompt": ("prompt.txt", b"a fox"), "input_reference": ("a.png", image_bytes(), "image/png")}
    answer = await client.post("/v1/videos", files=files)
    assert answer.status_code == 422
    assert "'prompt'" in json.dumps(answer.json()["errors"])


async def test_webhook_secret_is_drawn_sealed_and_shown_once(client: httpx.AsyncClient, farm: Farm) -> None:
    answer = await client.post("/v1/videos", json={**SUBMIT, "webhook": "https://hooks.example.com/in"})
    webhook = answer.json()["webhook"]
    assert webhook["url"] == "https://hooks.example.com/in"
    assert webhook["events"] == ["video.completed", "video.failed", "video.canceled", "video.expired"]
    (row,) = farm.execute(
        "SELECT s.ciphertext FROM webhook_secret s JOIN webhook_endpoint e ON e.id = s.endpoint_id"
    )
    assert unseal(farm.settings.secret_key, row.ciphertext) == webhook["signing_secret"]
    again = await client.get(f"/v1/videos/{answer.json()['id']}")
    assert again.json()["webhook"] is None
    assert webhook["signing_secret"] not in again.text


FORBIDDEN_TARGETS = (
    "http://example.com/",
    "https://localhost.internal/",
    "https://127.0.0.1/",
    "https://2130706433/",
    "https://[::ffff:10.0.0.1]/",
    "https://user:pw@example.com/",
    "https://example.com:22/",
)


@pytest.mark.req("F-33")
async def test_webhook_that_may_not_be_called_is_refused_at_submit(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    for url in FORBIDDEN_TARGETS:
        answer = await client.post("/v1/videos", json={**SUBMIT, "webhook": {"url": url}})
        assert (url, answer.status_code, answer.json()["errors"][0]["loc"]) == (url, 422, "webhook.url")
    assert farm.num_jobs() == 0


async def test_priority_above_normal_needs_its_scope(client: httpx.AsyncClient, farm: Farm) -> None:
    plain = farm.new_key(scopes=["videos:write"])
    headers = {"Authorization": f"Bearer {plain}"}
    refused = await client.post("/v1/videos", json={**SUBMIT, "priority": "high"}, headers=headers)
    allowed = await client.post("/v1/videos", json={**SUBMIT, "priority": "low"}, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
    assert (allowed.status_code, allowed.json()["priority"]) == (200, -5)


async def test_full_queue_answers_429_with_a_time(client: httpx.AsyncClient, farm: Farm) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 1}'")
    assert (await client.post("/v1/videos", json=SUBMIT)).status_code == 200
    answer = await client.post("/v1/videos", json=SUBMIT)
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert farm.num_jobs() == 1


async def test_store_that_is_away_refuses_images_and_takes_text(
    client: httpx.AsyncClient, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farm.storage import ObjectStore, StorageError

    def away(*_: object) -> None:
        raise StorageError

    monkeypatch.setattr(ObjectStore, "put", away)
    image = await _submit_image(client, image_bytes())
    assert (image.status_code, image.json()["code"]) == (503, "no_storage")
    assert farm.num_jobs() == 0
    assert (await client.post("/v1/videos", json=SUBMIT)).status_code == 200


async def test_store_that_hangs_holds_up_images_only(
    client: httpx.AsyncClient, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import deps
    from farm.storage import ObjectStore

    release = threading.Event()
    monkeypatch.setattr(ObjectStore, "put", lambda *_: release.wait(30))
    monkeypatch.setattr(deps, "STORE_TIMEOUT_S", 0.3)
    submits = [_submit_image(client, image_bytes()) for _ in range(20)]
    texts = [client.post("/v1/videos", json=SUBMIT) for _ in range(3)]
    answers = await asyncio.gather(*submits, *texts)
    release.set()
    assert {answer.status_code for answer in answers[:20]} == {503}
    assert {answer.status_code for answer in answers[20:]} == {200}
    assert farm.num_jobs() == 3


async def test_temporary_files_are_gone_after_a_submit_and_after_a_refusal(
    client: httpx.AsyncClient, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert (await _submit_image(client, image_bytes())).status_code == 200
    files = {"prompt": (None, ""), "input_reference": ("a.png", image_bytes(), "image/png")}
    assert (await client.post("/v1/videos", files=files)).status_code == 422
    assert list(folder.iterdir()) == []


@pytest.mark.req("F-10")
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1/videos/sync?timeout=soon", "timeout must be an integer (got soon)"),
        ("/v1/videos/sync?timeout=0", "timeout must be at least 1 (got 0)"),
        ("/v1/videos/sync?on_disconnect=x", "on_disconnect must be one of cancel or keep (got x)"),
    ],
)
async def test_parameter_that_is_refused_is_told_in_our_words(
    client: httpx.AsyncClient, path: str, sentence: str
) -> None:
    answer = await client.post(path, json=SUBMIT)
    assert (answer.status_code, answer.json()["detail"]) == (422, sentence)


@pytest.mark.req("F-10")
async def test_member_of_a_key_that_is_refused_is_told_in_our_words(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/keys", json={"expires_at": "tomorrow", "scopes": "videos:read"})
    said = {entry["loc"]: entry["msg"] for entry in answer.json()["errors"]}
    assert said["scopes"] == "scopes must be a list (got videos:read)"
    assert said["expires_at"].startswith("expires_at must be a time such as 2026-12-31T00:00:00Z")


@pytest.mark.req("F-10")
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "huge"}])
async def test_seed_of_thousands_of_digits_is_refused_by_its_name(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    body = '{"prompt": "a fox", "seed": ' + "9" * 5_000 + "}"
    answer = await client.post(
        "/v1/videos", content=body, headers={"Content-Type": "application/json", **headers}
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == "seed"
    assert "(got 9999999" in answer.json()["detail"]
