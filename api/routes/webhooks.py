"""Webhook management: endpoints, their secrets, samples, the delivery log and replays.

Everything needs the scope `webhooks:manage` and sees the caller's account only; the public keys are for
receivers, which need `videos:read`. Secrets are shown by a creation and a rotation and by nothing else; what
a receiver answered and at which address it was called is for operators and never shown here.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import structlog
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection

from api.auth import requires
from api.body import BodyRules, read_body
from api.deps import Services, ServicesDep
from api.idempotency import refuse_idempotency_key
from api.problems import RefusedError
from api.schemas import ProblemBody
from api.webhook_presenter import Shown, show_attempt, show_delivery, show_endpoint, show_keys
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
from api.webhook_targets import refusal_of
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
from magi2.contract import Problem

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1", tags=["webhooks"], responses={"4XX": {"model": ProblemBody}})

MAX_BODY_BYTES = 64 * 1024
# A sample is waited for as long as its delivery may take, and a little for the sender to see it.
TEST_MARGIN_S = 5.0
TEST_POLL_S = 0.2

Manager = Annotated[Principal, Depends(requires("webhooks:manage"))]
Receiver = Annotated[Principal, Depends(requires("videos:read"))]
Body = TypeVar("Body", bound=BaseModel)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that is read by hand."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"content": content}}


@router.post("/webhook_endpoints", openapi_extra=_body_of(EndpointCreate))
async def create_webhook_endpoint(
    request: Request, services: ServicesDep, principal: Manager
) -> WebhookEndpointWithSecret:
    """Make an endpoint; the answer is the only place that shows its secret."""
    body = await _read(request, services, EndpointCreate)
    await _check(services, body.url, body.event_types)
    new = NewEndpoint(
        url=body.url,
        event_types=_unique(body.event_types),
        name=body.name,
        payload_mode=body.payload,
        max_in_flight=body.max_in_flight,
        job_id=_checked(body.video_id, "video") if body.video_id is not None else None,
    )
    secret = new_secret()
    sealed = {HMAC: seal(services.secret_key, secret)}
    if body.ed25519:
        sealed[ED25519] = seal(services.secret_key, new_private_key())
    endpoint = await services.read(create_endpoint, principal.account_id, new, sealed)
    log.info("webhook_endpoint_created", endpoint=endpoint.id, account=principal.account_id)
    return _with_secret(services, endpoint, secret)


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


@router.post("/webhook_endpoints/{endpoint_id}", openapi_extra=_body_of(EndpointUpdate))
async def update_webhook_endpoint(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> WebhookEndpoint:
    """Change what the body names; `enabled: true` sends what was waiting."""
    body = await _read(request, services, EndpointUpdate)
    changes = body.model_dump(include=body.model_fields_set)
    await _check(services, changes.get("url"), changes.get("event_types", ()))
    if "event_types" in changes:
        changes["event_types"] = _unique(changes["event_types"])
    if "payload" in changes:
        changes["payload_mode"] = changes.pop("payload")
    wants_key = changes.pop("ed25519", None)
    key = seal(services.secret_key, new_private_key()) if wants_key else None
    endpoint = await services.read(
        lambda conn: update_endpoint(
            conn,
            principal.account_id,
            _checked(endpoint_id, "we"),
            changes,
            ed25519=key,
            drops_ed25519=wants_key is False,
        )
    )
    log.info("webhook_endpoint_updated", endpoint=endpoint.id, members=sorted(body.model_fields_set))
    return _shown(services, endpoint)


@router.delete("/webhook_endpoints/{endpoint_id}")
async def delete_webhook_endpoint(
    endpoint_id: str, services: ServicesDep, principal: Manager
) -> WebhookEndpointDeleted:
    """Remove an endpoint; what was still to be sent to it is canceled."""
    await services.read(delete_endpoint, principal.account_id, _checked(endpoint_id, "we"))
    log.info("webhook_endpoint_deleted", endpoint=endpoint_id, account=principal.account_id)
    return WebhookEndpointDeleted(id=endpoint_id)


@router.post("/webhook_endpoints/{endpoint_id}/rotate_secret", openapi_extra=_body_of(RotateSecret))
async def rotate_webhook_secret(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> WebhookEndpointWithSecret:
    """Give an endpoint a new secret; the old one ends at once, or after 24 hours."""
    body = await _read(request, services, RotateSecret)
    secret = new_secret()
    sealed = {
        HMAC: seal(services.secret_key, secret),
        ED25519: seal(services.secret_key, new_private_key()),
    }
    overlap_s = OVERLAP_S if body.keep_old_secret_active_for_24_hours else 0
    endpoint = await services.read(
        lambda conn: rotate_secrets(
            conn, principal.account_id, _checked(endpoint_id, "we"), sealed, overlap_s=overlap_s
        )
    )
    log.info("webhook_secret_rotated", endpoint=endpoint.id, overlap_s=overlap_s)
    return _with_secret(services, endpoint, secret)


@router.post("/webhook_endpoints/{endpoint_id}/test", openapi_extra=_body_of(SampleRequest))
async def test_webhook_endpoint(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> WebhookEndpointTest:
    """Send a sample of an event, once, and return what the receiver answered."""
    body = await _read(request, services, SampleRequest)
    _check_event_types([body.event_type], "event_type")
    account_id = principal.account_id
    delivery_id = await services.read(_begin_test, account_id, _checked(endpoint_id, "we"), body.event_type)
    attempt = await _first_attempt(services, account_id, delivery_id)
    return WebhookEndpointTest(
        webhook_endpoint_id=endpoint_id,
        event_type=body.event_type,
        success=attempt.http_status is not None,
        status_code=attempt.http_status,
        error=attempt.error,
        delivery_id=delivery_id,
    )


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
    _check_event_types([query.event_type] if query.event_type else [], "event_type")
    wanted = DeliveryQuery(query.status, query.event_type, after, query.limit)
    page = await services.read(list_deliveries, principal.account_id, _checked(endpoint_id, "we"), wanted)
    data = [show_delivery(row) for row in page.deliveries]
    return WebhookDeliveryList(
        data=data, first_id=_id_at(data, 0), last_id=_id_at(data, -1), has_more=page.has_more
    )


@router.post("/webhook_endpoints/{endpoint_id}/replay", openapi_extra=_body_of(ReplayRange))
async def replay_webhook_range(
    endpoint_id: str, request: Request, services: ServicesDep, principal: Manager
) -> WebhookEndpointReplay:
    """Send again what an endpoint missed in a stretch of time, or all of it."""
    body = await _read(request, services, ReplayRange)
    num_replayed = await services.read(
        lambda conn: replay_range(
            conn,
            principal.account_id,
            _checked(endpoint_id, "we"),
            since=datetime.fromtimestamp(body.since, UTC),
            until=datetime.fromtimestamp(body.until, UTC) if body.until is not None else None,
            only_failed=body.only_failed,
        )
    )
    log.info("webhook_range_replayed", endpoint=endpoint_id, num_replayed=num_replayed)
    return WebhookEndpointReplay(webhook_endpoint_id=endpoint_id, replayed=num_replayed)


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


@router.post("/webhook_deliveries/{delivery_id}/replay")
async def replay_webhook_delivery(
    delivery_id: str, request: Request, services: ServicesDep, principal: Manager
) -> WebhookDelivery:
    """Send one delivery again, under the same event id."""
    refuse_idempotency_key(request)
    row = await services.read(replay, principal.account_id, _checked(delivery_id, "whd"))
    log.info("webhook_delivery_replayed", delivery=delivery_id)
    return show_delivery(row)


@router.get("/webhooks/jwks.json")
async def get_webhook_keys(services: ServicesDep, principal: Receiver) -> PublicKeys:
    """Return the Ed25519 public keys that sign for this account now, as a JSON Web Key Set."""
    secrets = await services.read(public_keys, principal.account_id)
    return PublicKeys(keys=show_keys(secrets, lambda sealed: unseal(services.secret_key, sealed)))


async def _read(request: Request, services: Services, model: type[Body]) -> Body:
    """Read a JSON body strictly; no body at all means no members.

    Raises:
        RefusedError: Members that are missing, unknown or not allowed; all of them at once.
        FarmError: 400, 408, 413 or 415.
    """
    refuse_idempotency_key(request)
    members: dict[str, Any] = {}
    headers = request.headers
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            message = f"send application/json (got {media_type[:100] or 'no Content-Type'})"
            raise FarmError("unsupported_media_type", 415, message)
        rules = BodyRules(max_bytes=MAX_BODY_BYTES, timeout_s=services.body_rules.timeout_s)
        members = (await read_body(request, rules)).members
    try:
        return model.model_validate(members)
    except ValidationError as exc:
        raise RefusedError([_problem(entry) for entry in exc.errors(include_url=False)]) from None


def _problem(entry: Any) -> Problem:
    name = str(entry["loc"][0]) if entry["loc"] else "body"
    shown = name[:64].encode("ascii", "backslashreplace").decode()
    return Problem(shown, "invalid_field", f"{shown}: {entry['msg']}")


async def _check(services: Services, url: str | None, event_types: Any) -> None:
    problems = []
    refusal = await refusal_of(services, url) if url is not None else None
    if refusal is not None:
        problems.append(Problem("url", "invalid_field", f"url: {refusal}"))
    problems += _event_type_problems(event_types, "event_types")
    if problems:
        raise RefusedError(problems)


def _check_event_types(event_types: list[str], name: str) -> None:
    problems = _event_type_problems(event_types, name)
    if problems:
        raise RefusedError(problems)


def _event_type_problems(event_types: Any, name: str) -> list[Problem]:
    if all(kind in EVENT_TYPES for kind in event_types):
        return []
    return [Problem(name, "invalid_field", f"{name}: there are only {', '.join(EVENT_TYPES)}")]


def _unique(event_types: list[str]) -> list[str]:
    return list(dict.fromkeys(event_types))


def _checked(text: str, prefix: str) -> str:
    """Return an id that has the form of one; anything else names nothing, so the database is not asked."""
    if not is_id(text, prefix):
        raise NotFoundError({"we": "this webhook endpoint", "whd": "this delivery"}.get(prefix, "this video"))
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
