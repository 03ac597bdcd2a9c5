"""Batches: up to a hundred videos in one request, all or none of them, or each on its own."""

from dataclasses import replace
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import Connection

from api.auth import requires
from api.batches import BatchRequest, Item, count_jobs, take_batch
from api.body import Body, read_body
from api.deps import Services, ServicesDep
from api.idempotency import REPLAYED, Answer, answer_once, answer_post, find_answer, replayed, scope_of
from api.intake import store_input
from api.listing import list_query_of
from api.openapi import BATCH_BODY, PAGE_PARAMETERS
from api.presenter import present
from api.rates import count_submits
from api.routes.videos import PROBLEM
from api.schemas import BatchItem, BatchItemError, CreatedWebhook, VideoBatch, VideoList
from api.submission import queue
from api.views import checked_id, page_of, read_page
from farm import batches
from farm.accounts import Principal
from farm.batches import Batch
from farm.errors import AlreadyFinishedError, FarmError, NotFoundError, QueueFullError, QuotaExceededError
from farm.jobs.control import request_cancel
from farm.jobs.queries import ListQuery
from farm.jobs.submit import add_endpoint

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/videos/batches", tags=["batches"])

Reader = Annotated[Principal, Depends(requires("videos:read"))]
Writer = Annotated[Principal, Depends(requires("videos:write"))]
Canceler = Annotated[Principal, Depends(requires("videos:cancel"))]
WHAT = "this batch"


@router.post(
    "", response_model=VideoBatch, responses={"4XX": PROBLEM, "5XX": PROBLEM}, openapi_extra=BATCH_BODY
)
async def create_batch(request: Request, services: ServicesDep, principal: Writer) -> Response:
    """Accept many requests at once."""
    body = await _read(request, services)
    scope = await scope_of(request, principal, body.members)
    stored = await find_answer(services, scope)
    if stored is not None:
        return replayed(services, stored)
    num_jobs = count_jobs(body.members)
    await count_submits(request, services, principal, num_jobs)
    batch = await take_batch(services, principal, body.members)
    try:
        for item in batch.items:
            if item.intake:
                item.intake.submission = await store_input(services, item.intake)
        async with services.turns.turn(principal.account_id):
            answer = await answer_once(
                services, scope, lambda conn: _queue_all(conn, services, principal, batch)
            )
    finally:
        batch.discard()
    if REPLAYED in answer.headers:
        await count_submits(request, services, principal, -num_jobs)
    return answer


@router.get("/{batch_id}", responses={"4XX": PROBLEM})
async def get_batch(batch_id: str, services: ServicesDep, principal: Reader) -> VideoBatch:
    """Return a batch with how many of its videos wait, run, are done, have failed."""
    checked_id(batch_id, "batch", WHAT)
    return await services.look(_read_batch, principal.account_id, batch_id)


@router.get(
    "/{batch_id}/items", response_model=VideoList, responses={"4XX": PROBLEM}, openapi_extra=PAGE_PARAMETERS
)
async def list_batch_items(
    batch_id: str, request: Request, services: ServicesDep, principal: Reader
) -> Response:
    """Return a page of the videos of a batch."""
    checked_id(batch_id, "batch", WHAT)
    query = list_query_of(request.query_params, batch_id=batch_id)
    views, has_more = await services.look(_read_items, principal.account_id, query)
    base_url = services.settings.base_url
    return Answer.of(page_of([present(view, base_url) for view in views], has_more=has_more)).response()


@router.post("/{batch_id}/cancel", response_model=VideoBatch, responses={"4XX": PROBLEM})
async def cancel_batch(
    batch_id: str, request: Request, services: ServicesDep, principal: Canceler
) -> Response:
    """Stop every video of a batch that has not ended, each in a transaction of its own."""
    checked_id(batch_id, "batch", WHAT)
    account_id = principal.account_id
    await services.look(batches.get_batch, account_id, batch_id)
    for job_id in await services.look(batches.open_members, batch_id):
        try:
            await services.read(request_cancel, account_id, job_id, principal.key_id)
        except (AlreadyFinishedError, NotFoundError):
            continue
    return await answer_post(
        request, services, principal, {}, lambda conn: Answer.of(_read_batch(conn, account_id, batch_id))
    )


async def _read(request: Request, services: Services) -> Body:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"send application/json (got {media_type[:100] or 'no Content-Type'})"
        raise FarmError("unsupported_media_type", 415, message)
    return await read_body(request, services.body_rules)


def _queue_all(conn: Connection, services: Services, principal: Principal, request: BatchRequest) -> Answer:
    """Write the batch and its jobs; where the batch is atomic, one refusal takes all of it back."""
    batch = batches.create_batch(conn, principal.account_id, len(request.items), request.metadata)
    if request.webhook:
        add_endpoint(conn, principal.account_id, request.webhook, batch_id=batch.id)
    items = [_queue_one(conn, services, batch, item, is_atomic=request.is_atomic) for item in request.items]
    num_accepted = sum(item.video_id is not None for item in items)
    if not num_accepted:
        raise next(item.error for item in request.items if item.error)
    batches.set_total(conn, batch.id, num_accepted)
    log.info("batch_submitted", batch=batch.id, account=principal.account_id, num_jobs=num_accepted)
    shown = _show(conn, batch, items=items, webhook=request.shown_webhook)
    return Answer.of(shown, headers={"Location": f"/v1/videos/batches/{batch.id}"})


def _queue_one(
    conn: Connection, services: Services, batch: Batch, item: Item, *, is_atomic: bool
) -> BatchItem:
    if item.intake is not None:
        submission = item.intake.submission
        try:
            job = queue(conn, services, replace(submission, batch_id=batch.id))
        except (QueueFullError, QuotaExceededError) as exc:
            if is_atomic:
                raise
            item.error = exc
        else:
            return BatchItem(index=item.index, video_id=job.id, seed=job.seed, error=None)
    return BatchItem(index=item.index, video_id=None, seed=None, error=_error_of(item))


def _error_of(item: Item) -> BatchItemError:
    error = item.error or FarmError("internal", 500, "the item was not queued")
    param = error.errors[0].loc if error.errors else None
    return BatchItemError(code=error.code, message=error.message, param=param)


def _read_batch(conn: Connection, account_id: str, batch_id: str) -> VideoBatch:
    return _show(conn, batches.get_batch(conn, account_id, batch_id))


def _read_items(conn: Connection, account_id: str, query: ListQuery) -> Any:
    batches.get_batch(conn, account_id, str(query.batch_id))
    return read_page(conn, account_id, query)


def _show(
    conn: Connection,
    batch: Batch,
    *,
    items: list[BatchItem] | None = None,
    webhook: CreatedWebhook | None = None,
) -> VideoBatch:
    return VideoBatch(
        id=batch.id,
        created_at=int(batch.created_at.timestamp()),
        finished_at=int(batch.finished_at.timestamp()) if batch.finished_at else None,
        counts=batches.counts_of(conn, batch.id),
        metadata=batch.metadata,
        items=items,
        webhook=webhook,
    )
