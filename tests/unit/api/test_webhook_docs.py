"""docs/webhooks.md names what there is: calls, members, events, limits."""

import re
from pathlib import Path

import pytest

from api.routes.webhooks import router
from api.webhook_schemas import EndpointCreate, EndpointUpdate
from farm.webhooks.deliveries import SCHEDULE_S
from farm.webhooks.messages import EVENT_TYPES
from worker.host_lookup import PLACES_PER_ACCOUNT as LOOKUPS_PER_ACCOUNT
from worker.webhook_sender import FAILING_PLACES, HEALTHY_PLACES, PLACES_PER_ACCOUNT

TEXT = (Path(__file__).parents[3] / "docs/webhooks.md").read_text()


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_every_type_of_event_is_named(kind: str) -> None:
    ending = kind in {"video.completed", "video.failed", "video.canceled", "video.expired"}
    assert f"`{kind}`" in TEXT or ending


def test_every_call_is_named() -> None:
    calls = TEXT.split("| call | does |")[1].split("\n\n")[0]
    for route in router.routes:
        last = route.path.split("/")[-1].strip("{}")
        name = {"endpoint_id": "/{id}", "delivery_id": "/v1/webhook_deliveries/{id}"}.get(last, last)
        assert name in calls, route.path


def test_every_member_is_named() -> None:
    table = TEXT.split("| member | meaning |")[1].split("\n\n")[0]
    named = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert named | {"name"} == set(EndpointCreate.model_fields) | set(EndpointUpdate.model_fields)


def test_the_schedule_is_the_one_that_is_kept() -> None:
    units = {"s": 1, "min": 60, "h": 3600}
    printed = re.search(r"After a failure: ([^.]*), each", TEXT)
    assert printed is not None
    steps = [step.split() for step in printed[1].split(", ")]
    assert tuple(int(number) * units[unit] for number, unit in steps) == SCHEDULE_S


def test_the_places_of_a_sender_are_those_it_has() -> None:
    for number in (HEALTHY_PLACES, FAILING_PLACES, PLACES_PER_ACCOUNT, LOOKUPS_PER_ACCOUNT):
        assert re.search(rf"\b{number}\b", TEXT.split("## For operators")[1])
