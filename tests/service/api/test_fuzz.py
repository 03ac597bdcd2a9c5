"""Whatever is sent: never a 5xx, and never a row after a refusal."""

import json
import string
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.members import EXTRA_PARAMS
from magi2.contract import REQUEST_FIELDS
from tests.service.api.conftest import Farm, image_bytes

pytestmark = pytest.mark.req("F-15")

FARM_FIELDS = ("model", "profile", "priority", "expires_in", "execution_timeout_s", "max_attempts", "webhook")
MORE_FIELDS = ("metadata", "user", "retention_s", "reuse", "extra_params", "input_reference", "style")
NAMES = sorted({*REQUEST_FIELDS, *FARM_FIELDS, *MORE_FIELDS})
LIKELY: tuple[Any, ...] = (
    "a red fox", "10", 10, 12.5, 125, "448x256", "272p", 448, 256, 4, "4", 0, -1, 2**63, 1e308, True, None,
    "auto", "tiny-cpu", "off", "high", {"resolution": "272p"}, '{"resolution": "272p"}', {"a": "b"}, [], {},
    {"url": "https://example.com/"}, "https://example.com/", {"image_url": "data:image/png;base64,AAAA"},
    "", "\0", "\ud800", "\u202e", "9" * 400, "{", '{"a": 1, "a": 2}', "magi-2-preview", "text-to-video",
)  # fmt: skip
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
VALUES = st.sampled_from(LIKELY) | ANY
# The start is acceptable, so that what is drawn decides.
GOOD = {"prompt": "a fox", "size": "448x256"}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def check(client: httpx.AsyncClient, farm: Farm, **request: Any) -> None:
    before = farm.num_jobs()
    answer = await client.post("/v1/videos", **request)
    assert answer.status_code < 500, answer.text
    assert farm.num_jobs() - before == (1 if answer.status_code == 200 else 0)
    if answer.status_code != 200:
        body = answer.json()
        assert body["status"] == answer.status_code
        assert body["error"]["code"] == body["code"]
        return
    shown = await client.get(f"/v1/videos/{answer.json()['id']}")
    assert shown.json()["seed"] == answer.json()["seed"]


@pytest.fixture(autouse=True)
def room(farm: Farm) -> None:
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 100000}'")


@QUICK
@given(members=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=6))
async def test_any_json_object(client: httpx.AsyncClient, farm: Farm, members: dict[str, Any]) -> None:
    text = json.dumps({**GOOD, **members})
    await check(client, farm, content=text, headers={"Content-Type": "application/json"})


@QUICK
@given(
    prompt=st.text(min_size=1, max_size=30),
    user=st.none() | st.text(max_size=10),
    metadata=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
    seed=st.integers(-2, 2**63 + 1),
)
async def test_any_text_is_kept_as_it_came_or_refused(
    client: httpx.AsyncClient, farm: Farm, prompt: str, user: str | None, metadata: dict[str, str], seed: int
) -> None:
    wanted = {"prompt": prompt, "user": user, "metadata": metadata, "seed": seed}
    before = farm.num_jobs()
    answer = await client.post("/v1/videos", json=wanted)
    if answer.status_code == 200:
        shown = (await client.get(f"/v1/videos/{answer.json()['id']}")).json()
        assert {name: shown[name] for name in wanted} == wanted
    else:
        assert answer.status_code == 422
    assert farm.num_jobs() - before == int(answer.status_code == 200)


@QUICK
@given(
    data=st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | ANY.map(lambda value: json.dumps(value).encode())
)
async def test_any_bytes_as_json(client: httpx.AsyncClient, farm: Farm, data: bytes) -> None:
    await check(client, farm, content=data, headers={"Content-Type": "application/json"})


PATHS = st.sampled_from(NAMES).flatmap(
    lambda name: st.lists(
        st.sampled_from([*EXTRA_PARAMS, "url", "events", "image_url", "a", ""]), max_size=3
    ).map(lambda steps: name + "".join(f"[{step}]" for step in steps))
)
TEXTS = VALUES.map(lambda value: value if isinstance(value, str) else json.dumps(value)).filter(
    lambda text: text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
)


@QUICK
@given(
    fields=st.lists(st.tuples(PATHS | st.text(string.printable, min_size=1, max_size=8), TEXTS), max_size=6),
    files=st.lists(
        st.tuples(
            st.sampled_from(["input_reference", "input_reference[]", "image", "prompt"]),
            st.sampled_from([image_bytes(), image_bytes()[:200], b"", b"GIF89a"]),
            st.sampled_from(["image/png", "video/mp4", "", "text/plain"]),
        ),
        max_size=2,
    ),
)
async def test_any_form(
    client: httpx.AsyncClient, farm: Farm, fields: list[tuple[str, str]], files: list[tuple[str, bytes, str]]
) -> None:
    given_names = {name.split("[")[0] for name, _ in fields}
    good = [(name, (None, value)) for name, value in GOOD.items() if name not in given_names]
    texts = [(name, (None, value.encode())) for name, value in fields]
    uploads = [(name, ("x.png", data, kind)) for name, data, kind in files]
    await check(client, farm, files=[*good, *texts, *uploads])


@QUICK
@given(query=st.text(max_size=40), video_id=st.text(max_size=40))
async def test_any_query_and_id(client: httpx.AsyncClient, query: str, video_id: str) -> None:
    clean = query.encode("utf-8", "replace").decode()
    params = dict.fromkeys(["after", "limit", "state", "user", "metadata[a]", "created_after", clean], clean)
    path = quote(video_id.encode("utf-8", "replace"), safe="")
    assert (await client.get("/v1/videos", params=params)).status_code < 500
    assert (await client.get(f"/v1/videos/{path}")).status_code < 500
