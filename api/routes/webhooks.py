"""Webhook management: endpoints, their secrets, samples, the delivery log and replays.

Everything needs the scope `webhooks:manage` and sees the caller's account only; the public keys are for
receivers, which need `videos:read`. Secrets are shown by a creation and a rotation and by nothing else; what
a receiver answered and at which address it was called is for operators and never shown here.
"""

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import Connection

from api.auth import requires
from api.deps import Services, ServicesDep
from api.idempotency import REPLAYED
from api.json_body import body_of, read_model
from api.schemas import ProblemBody
from api.webhook_presenter import Shown, show_attempt, show_delivery, show_endpoint, show_keys
from api.webhook_requests import answer, check_endpoint, check_event_type
from api.webhook_schemas import (
    DeliveryListQuery,
    EndpointCreate,
    EndpointListQuery,
    EndpointUpdate,
    PublicKeys,
    ReplayRange,
    RotateSecret,
    SampleRequest,
    WebhookDelivery,
    WebhookDeliveryDetail,
    WebhookDeliveryList,
    WebhookEndpoint,
    WebhookEndpointDeleted,
    WebhookEndpointList,
    WebhookEndpointReplay,
    WebhookEndpointTest,
    WebhookEndpointWithSecret,
    WebhookEventTypeList,
)
from farm.accounts import Principal
from farm.clock import monotonic_s
from farm.errors import FarmError, NotFoundError
from farm.ids import is_id
from farm.secretbox import seal, unseal
from farm.webhooks.delivery_log import (
    Attempt,
    DeliveryQuery,
    EndpointDisabledError,
    get_delivery,
    list_deliveries,
    replay,
    replay_range,
)
from farm.webhooks.endpoints import (
    ED25519,
    HMAC,
    OVERLAP_S,
    Endpoint,
    NewEndpoint,
    create_endpoint,
    delete_endpoint,
    get_endpoint,
    list_endpoints,
    public_keys,
    rotate_secrets,
    update_endpoint,
)
from farm.webhooks.messages import EVENT_TYPES, write_test
from farm.webhooks.signing import new_private_key, new_secret
from magi2.values import shown

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1", tags=["webhooks"], responses={"4XX": {"model": ProblemBody}})

# A sample is waited for as long as its delivery may take, and a little for the sender to see it.
TEST_MARGIN_S = 5.0
TEST_POLL_S = 0.2

Manager = Annotated[Principal, Depends(requires("webhooks:manage"))]
Receiver = Annotated[Principal, Depends(requires("videos:read"))]


@router.post(
    "/webhook_endpoints",
    response_model=WebhookEndpointWithSecret,
    openapi_extra=body_of(EndpointCreate),
)
async def create_webhook_endpoint(request: Request, services: ServicesDep, principal: Manager) -> Response:
    """Make an endpoint; the answer is the only place that shows its secret."""
    body = await read_model(request, services, EndpointCreate)
    secret = new_secret()
    sealed = {HMAC: seal(services.secret_key, secret)}
    if body.ed25519:
        sealed[ED25519] = seal(services.secret_key, new_private_key())

    def act(conn: Connection) -> WebhookEndpointWithSecret:
        new = NewEndpoint(
            url=body.url,
            event_types=_unique(body.event_types),
            name=body.name,
            payload_mode=body.payload,
            max_in_flight=body.max_in_flight,
            job_id=_checked(body.video_id, "video") if body.video_id is not None else None,
        )
        endpoint = create_endpoint(conn, principal.account_id, new, sealed)
        log.info("webhook_endpoint_created", endpoint=endpoint.id, account=principal.account_id)
        return _with_secret(services, endpoint, secret)

    async def check() -> None:
        await check_endpoint(services, body.url, body.event_types)

    return await answer(request, services, principal, body, act, check)


@router.get("/webhook_endpoints")
async def list_webhook_endpoints(
    query: Annotated[EndpointListQuery, Query()], services: ServicesDep, principal: Manager
) -> WebhookEndpointList:
    """Return a page of the account's endpoints, newest first; those of single videos are asked for by id."""
    after = _checked(query.after, "we") if query.after is not None else None
    video_id = _checked(query.video_id, "video") if query.video_id is not None else None
    page = await services.read(
        lambda conn: list_endpoints(
            conn, principal.account_id, job_id=video_id, after=after, limit=query.limit
        )
    )
    data = [_shown(services, endpoint) for endpoint in page.endpoints]
    return WebhookEndpointList(
        data=data, first_id=_id_at(data, 0), last_id=_id_at(data, -1), has_more=page.has_more
    )


@router.get("/webhook_endpoints/{endpoint_id}")
async def get_webhook_endpoint(
    endpoint_id: str, services: ServicesDep, principal: Manager
) -> WebhookEndpoint:
    """Return one endpoint."""
    endpoint = await services.read(get_endpoint, principal.account_id, _checked(endpoint_id, "we"))
    return _shown(services, endpoint)


@router.post(
    "/webhook_endpoints/{endpoint_id}",
    response_model=WebhookEndpoint,
    openapi_extra=body_of(EndpointUpdate),
)
async def update_webhook_endpoint(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> Response:
    """Change what the body names; `enabled: true` sends what was waiting."""
    body = await read_model(request, services, EndpointUpdate)
    changes = body.model_dump(include=body.model_fields_set)
    event_types = changes.get("event_types", [])
    if event_types:
        changes["event_types"] = _unique(event_types)
    if "payload" in changes:
        changes["payload_mode"] = changes.pop("payload")
    wants_key = changes.pop("ed25519", None)
    key = seal(services.secret_key, new_private_key()) if wants_key else None

    def act(conn: Connection) -> WebhookEndpoint:
        endpoint = update_endpoint(
            conn,
            principal.account_id,
            _checked(endpoint_id, "we"),
            changes,
            ed25519=key,
            drops_ed25519=wants_key is False,
        )
        log.info("webhook_endpoint_updated", endpoint=endpoint.id, members=sorted(body.model_fields_set))
        return _shown(services, endpoint)

    async def check() -> None:
        await check_endpoint(services, changes.get("url"), event_types)

    return await answer(request, services, principal, body, act, check)


@router.delete("/webhook_endpoints/{endpoint_id}")
async def delete_webhook_endpoint(
    endpoint_id: str, services: ServicesDep, principal: Manager
) -> WebhookEndpointDeleted:
    """Remove an endpoint; what was still to be sent to it is canceled."""
    await services.read(delete_endpoint, principal.account_id, _checked(endpoint_id, "we"))
    log.info("webhook_endpoint_deleted", endpoint=endpoint_id, account=principal.account_id)
    return WebhookEndpointDeleted(id=endpoint_id)


@router.post(
    "/webhook_endpoints/{endpoint_id}/rotate_secret",
    response_model=WebhookEndpointWithSecret,
    openapi_extra=body_of(RotateSecret),
)
async def rotate_webhook_secret(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> Response:
    """Give an endpoint a new secret; the old one ends at once, or after 24 hours."""
    body = await read_model(request, services, RotateSecret)
    secret = new_secret()
    sealed = {
        HMAC: seal(services.secret_key, secret),
        ED25519: seal(services.secret_key, new_private_key()),
    }
    overlap_s = OVERLAP_S if body.keep_old_secret_active_for_24_hours else 0

    def act(conn: Connection) -> WebhookEndpointWithSecret:
        mine = _checked(endpoint_id, "we")
        endpoint = rotate_secrets(conn, principal.account_id, mine, sealed, overlap_s=overlap_s)
        log.info("webhook_secret_rotated", endpoint=endpoint.id, overlap_s=overlap_s)
        return _with_secret(services, endpoint, secret)

    return await answer(request, services, principal, body, act)


@router.post(
    "/webhook_endpoints/{endpoint_id}/test",
    response_model=WebhookEndpointTest,
    openapi_extra=body_of(SampleRequest),
)
async def test_webhook_endpoint(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> Response:
    """Send a sample of an event, once, and return what the receiver answered."""
    body = await read_model(request, services, SampleRequest)
    check_event_type(body.event_type)

    def act(conn: Connection) -> WebhookEndpointTest:
        delivery_id = _begin_test(conn, principal.account_id, _checked(endpoint_id, "we"), body.event_type)
        return WebhookEndpointTest(
            webhook_endpoint_id=endpoint_id, event_type=body.event_type, delivery_id=delivery_id
        )

    # What is kept for a repeat is which delivery it is; the repeat waits for the same one.
    begun = await answer(request, services, principal, body, act)
    test = WebhookEndpointTest(**json.loads(bytes(begun.body)))
    attempt = await _first_attempt(services, principal.account_id, test.delivery_id)
    came = {
        "success": attempt.http_status is not None,
        "status_code": attempt.http_status,
        "error": attempt.error,
    }
    headers = {REPLAYED: "true"} if REPLAYED in begun.headers else None
    text = test.model_copy(update=came).model_dump_json()
    return Response(text, media_type="application/json", headers=headers)


@router.get("/webhook_event_types")
async def list_webhook_event_types(_: Manager) -> WebhookEventTypeList:
    """Return the types that an endpoint may subscribe to."""
    return WebhookEventTypeList(data=list(EVENT_TYPES))


@router.get("/webhook_endpoints/{endpoint_id}/deliveries")
async def list_webhook_deliveries(
    endpoint_id: str,
    query: Annotated[DeliveryListQuery, Query()],
    services: ServicesDep,
    principal: Manager,
) -> WebhookDeliveryList:
    """Return a page of what an endpoint was or is to be told, newest first."""
    after = _checked(query.after, "whd") if query.after is not None else None
    check_event_type(query.event_type)
    wanted = DeliveryQuery(query.status, query.event_type, after, query.limit)
    page = await services.read(list_deliveries, principal.account_id, _checked(endpoint_id, "we"), wanted)
    data = [show_delivery(row) for row in page.deliveries]
    return WebhookDeliveryList(
        data=data, first_id=_id_at(data, 0), last_id=_id_at(data, -1), has_more=page.has_more
    )


@router.post(
    "/webhook_endpoints/{endpoint_id}/replay",
    response_model=WebhookEndpointReplay,
    openapi_extra=body_of(ReplayRange),
)
async def replay_webhook_range(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> Response:
    """Send again what an endpoint missed in a stretch of time, or all of it."""
    body = await read_model(request, services, ReplayRange)

    def act(conn: Connection) -> WebhookEndpointReplay:
        num_replayed = replay_range(
            conn,
            principal.account_id,
            _checked(endpoint_id, "we"),
            since=datetime.fromtimestamp(body.since, UTC),
            until=datetime.fromtimestamp(body.until, UTC) if body.until is not None else None,
            only_failed=body.only_failed,
        )
        log.info("webhook_range_replayed", endpoint=endpoint_id, num_replayed=num_replayed)
        return WebhookEndpointReplay(webhook_endpoint_id=endpoint_id, replayed=num_replayed)

    return await answer(request, services, principal, body, act)


@router.get("/webhook_deliveries/{delivery_id}")
async def get_webhook_delivery(
    delivery_id: str, services: ServicesDep, principal: Manager
) -> WebhookDeliveryDetail:
    """Return one delivery with its event and every attempt."""
    row, event, attempts = await services.read(
        get_delivery, principal.account_id, _checked(delivery_id, "whd")
    )
    log_lines = [show_attempt(attempt) for attempt in attempts]
    return WebhookDeliveryDetail(**show_delivery(row).model_dump(), event=event, attempt_log=log_lines)


@router.post("/webhook_deliveries/{delivery_id}/replay", response_model=WebhookDelivery)
async def replay_webhook_delivery(
    delivery_id: str, request: Request, services: ServicesDep, principal: Manager
) -> Response:
    """Send one delivery again, under the same event id."""

    def act(conn: Connection) -> WebhookDelivery:
        log.info("webhook_delivery_replayed", delivery=delivery_id)
        return show_delivery(replay(conn, principal.account_id, _checked(delivery_id, "whd")))

    return await answer(request, services, principal, None, act)


@router.get("/webhooks/jwks.json")
async def get_webhook_keys(services: ServicesDep, principal: Receiver) -> PublicKeys:
    """Return the Ed25519 public keys that sign for this account now, as a JSON Web Key Set."""
    secrets = await services.read(public_keys, principal.account_id)
    return PublicKeys(keys=show_keys(secrets, lambda sealed: unseal(services.secret_key, sealed)))


def _unique(event_types: list[str]) -> list[str]:
    return list(dict.fromkeys(event_types))


def _checked(text: str, prefix: str) -> str:
    """Return an id that has the form of one; anything else names nothing, so the database is not asked."""
    if not is_id(text, prefix):
        what = {"we": "this webhook endpoint", "whd": "this delivery"}.get(prefix, "this video")
        raise NotFoundError(f"{what} ({shown(text)})")
    return text


def _begin_test(conn: Connection, account_id: str, endpoint_id: str, kind: str) -> str:
    endpoint = get_endpoint(conn, account_id, endpoint_id)
    if not endpoint.enabled:
        raise EndpointDisabledError(endpoint_id, endpoint.disabled_reason)
    return write_test(conn, account_id, endpoint_id, kind)


async def _first_attempt(services: Services, account_id: str, delivery_id: str) -> Attempt:
    until_s = monotonic_s() + services.settings.webhook.timeout_s + TEST_MARGIN_S
    while monotonic_s() < until_s and not services.is_stopping():
        _, _, attempts = await services.read(get_delivery, account_id, delivery_id)
        if attempts:
            return attempts[0]
        await asyncio.sleep(TEST_POLL_S)
    message = (
        f"the sample has not been sent yet; GET /v1/webhook_deliveries/{delivery_id} tells what comes of it"
    )
    raise FarmError("sync_timeout", 504, message)


def _shown(services: Services, endpoint: Endpoint) -> WebhookEndpoint:
    return WebhookEndpoint(**_members(services, endpoint))


def _with_secret(services: Services, endpoint: Endpoint, secret: str) -> WebhookEndpointWithSecret:
    return WebhookEndpointWithSecret(**_members(services, endpoint), signing_secret=secret)


def _members(services: Services, endpoint: Endpoint) -> Shown:
    return show_endpoint(endpoint, lambda sealed: unseal(services.secret_key, sealed))


def _id_at(data: Sequence[WebhookEndpoint] | Sequence[WebhookDelivery], place: int) -> str | None:
    return data[place].id if data else None
