"""The description is true: whatever it allows is answered as it says, with and without a key, no 5xx."""

import warnings
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import create_app
from tests.service.api.conftest import SUBMIT, Farm, resolver

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Waits for a worker that this test has not, or for ever.
WITHOUT = {"/v1/videos/sync", "/v1/events", "/v1/videos/{video_id}/events"}
QUICK = settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture
def operations(farm: Farm) -> list[Any]:
    app = create_app(farm.settings, resolver=resolver)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if operation.path not in WITHOUT]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.req("F-10")
@pytest.mark.parametrize("has_key", [True, False], ids=["with key", "without"])
def test_every_operation_answers_as_described(farm: Farm, operations: list[Any], has_key: bool) -> None:  # noqa: FBT001 - a parameter
    farm.execute("UPDATE account SET limits = '{\"max_queued\": 100000}'")
    headers = {"Authorization": f"Bearer {farm.key}"} if has_key else {}
    codes: set[int] = set()
    assert len(operations) > 35
    for operation in operations:

        @QUICK
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            answer = case.call(headers=headers)
            codes.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    assert codes >= ({200, 401} - ({401} if has_key else {200}) | {404} if has_key else {401})


async def test_page_of_the_api_loads_nothing_and_can_be_switched_off(
    client: httpx.AsyncClient, farm: Farm
) -> None:
    page = await client.get("/docs")
    assert page.status_code == 200
    assert "POST /v1/videos" in page.text
    for word in ("http://", "https://", "<script", "<link", "<img", "@import"):
        assert word not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    async with farm.client(api_docs=False) as other:
        assert (await other.get("/docs")).status_code == 404
        assert (await other.get("/redoc")).status_code == 404
        assert (await other.get("/openapi.json")).status_code == 200
    assert (await client.post("/v1/videos", json=SUBMIT)).status_code == 200
