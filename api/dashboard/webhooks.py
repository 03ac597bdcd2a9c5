"""Pages of webhooks: endpoints, their deliveries, what went out and what came back; and sending again."""

from datetime import UTC, datetime

from sqlalchemy import Connection

from api.dashboard.changes import Change, Done, change_route
from api.dashboard.pages import Ask, Context, Page
from farm.errors import InvalidFieldError, NotFoundError
from farm.ids import is_id
from farm.watch.service import endpoints, owner_of_delivery, owner_of_endpoint
from farm.webhooks.delivery_log import (
    DeliveryQuery,
    get_delivery,
    list_deliveries,
    replay,
    replay_range,
)
from farm.webhooks.endpoints import Endpoint, get_endpoint, update_endpoint

PER_PAGE = 50
STATUSES = ("pending", "leased", "ok", "dead", "canceled")


async def load_endpoints(ask: Ask) -> Context:
    """Read all endpoints, failing ones first."""
    return {"endpoints": await ask.services.look(endpoints)}


async def load_endpoint(ask: Ask) -> Context:
    """Read one endpoint and a page of its deliveries."""
    endpoint_id = _checked(ask.part("endpoint_id"), "we", "this endpoint")
    status, after = ask.word("status"), ask.word("after")

    def read(conn: Connection) -> Context:
        owner = owner_of_endpoint(conn, endpoint_id)
        query = DeliveryQuery(
            status=status if status in STATUSES else None, after=after or None, limit=PER_PAGE
        )
        return {
            "endpoint": get_endpoint(conn, owner, endpoint_id),
            "page": list_deliveries(conn, owner, endpoint_id, query),
        }

    return {**await ask.services.look(read), "chosen": status, "statuses": STATUSES}


async def load_delivery(ask: Ask) -> Context:
    """Read one delivery with its message and every attempt."""
    delivery_id = _checked(ask.part("delivery_id"), "whd", "this delivery")

    def read(conn: Connection) -> Context:
        owner = owner_of_delivery(conn, delivery_id)
        row, body, attempts = get_delivery(conn, owner, delivery_id)
        return {"delivery": row, "body": body, "attempts": attempts}

    return await ask.services.look(read)


async def replay_one(change: Change) -> Done:
    """Send one delivery again."""
    delivery_id = _checked(change.part("delivery_id"), "whd", "this delivery")

    def work(conn: Connection) -> str:
        owner = owner_of_delivery(conn, delivery_id)
        before, _, _ = get_delivery(conn, owner, delivery_id)
        after = replay(conn, owner, delivery_id)
        was = {"status": before.status, "attempts": before.attempts}
        change.note(
            conn, "webhook.replay", delivery_id, was, {"status": after.status, "attempts": after.attempts}
        )
        return after.status

    status = await change.services.read(work)
    return Done("Sent again, under the same message id.", members={"id": delivery_id, "status": status})


async def replay_many(change: Change) -> Done:
    """Send again what an endpoint was to be told in a stretch of time."""
    endpoint_id = _checked(change.part("endpoint_id"), "we", "this endpoint")
    since, until = _instant(change, "since"), _instant(change, "until")
    if since is None:
        raise InvalidFieldError("since", "say from when on: a date such as 2026-03-31 or 2026-03-31T12:00")
    only_failed = change.word("only_failed") in {"on", "true", "1"}

    def work(conn: Connection) -> int:
        owner = owner_of_endpoint(conn, endpoint_id)
        num = replay_range(conn, owner, endpoint_id, since=since, until=until, only_failed=only_failed)
        said = {"since": since, "until": until, "only_failed": only_failed}
        change.note(conn, "webhook.replay_range", endpoint_id, said, {"replayed": num})
        return num

    num = await change.services.read(work)
    return Done(
        f"{num} {'delivery is' if num == 1 else 'deliveries are'} sent again.", members={"replayed": num}
    )


async def enable(change: Change) -> Done:
    """Turn an endpoint on again; what waited goes out."""
    await _switch(change, is_enabled=True)
    return Done("The endpoint is on again; what was waiting goes out now.")


async def disable(change: Change) -> Done:
    """Turn an endpoint off; what waits is kept."""
    await _switch(change, is_enabled=False)
    return Done("The endpoint is off. What waits for it is kept.")


async def _switch(change: Change, *, is_enabled: bool) -> None:
    endpoint_id = _checked(change.part("endpoint_id"), "we", "this endpoint")
    action = "webhook.enable" if is_enabled else "webhook.disable"

    def work(conn: Connection) -> None:
        owner = owner_of_endpoint(conn, endpoint_id)
        before = get_endpoint(conn, owner, endpoint_id)
        after = update_endpoint(conn, owner, endpoint_id, {"enabled": is_enabled})
        change.note(conn, action, endpoint_id, _state(before), _state(after))

    await change.services.read(work)


def _state(endpoint: Endpoint) -> dict[str, object]:
    return {"enabled": endpoint.enabled, "disabled_reason": endpoint.disabled_reason}


def _checked(text: str, prefix: str, what: str) -> str:
    if not is_id(text, prefix):
        raise NotFoundError(what)
    return text


def _instant(change: Change, field: str) -> datetime | None:
    text = change.word(field)
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        message = f"{field} is {text!r}; use a date such as 2026-03-31 or 2026-03-31T12:00"
        raise InvalidFieldError(field, message) from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


PAGES = (
    Page("/webhooks", "webhooks", "webhooks", load_endpoints, regions=("endpoint_list",), every_s=3.0),
    Page(
        "/webhooks/deliveries/{delivery_id}",
        "delivery",
        "webhooks",
        load_delivery,
        regions=("delivery_state",),
    ),
    Page("/webhooks/{endpoint_id}", "endpoint", "webhooks", load_endpoint, regions=("delivery_list",)),
)
CHANGES = (
    change_route("/deliveries/{delivery_id}/replay", replay_one),
    change_route("/webhooks/{endpoint_id}/replay", replay_many),
    change_route("/webhooks/{endpoint_id}/enable", enable),
    change_route("/webhooks/{endpoint_id}/disable", disable),
)
