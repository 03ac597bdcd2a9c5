"""Input images that several videos use: uploaded once, named by id afterwards.

The file is normalised exactly as one that comes with a submit; its own bytes and name are not kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import Connection

from api.auth import requires
from api.body import Body, read_body
from api.deps import Services, ServicesDep
from api.idempotency import Answer, answer_once, find_answer, replayed, scope_of
from api.intake import store_image
from api.problems import RefusedError
from api.reference import Reference, take_reference
from api.schemas import ProblemBody
from api.service_schemas import AssetDeleted, AssetInfo
from api.views import checked_id
from farm.accounts import Principal
from farm.assets import Image, delete_image, get_image
from magi2.contract import IMAGE_FIELD, Problem

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/assets", tags=["assets"], responses={"4XX": {"model": ProblemBody}})

FILE = "file"
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [FILE],
                    "additionalProperties": False,
                    "properties": {FILE: {"type": "string", "contentMediaType": "application/octet-stream"}},
                }
            }
        },
    }
}
Writer = Annotated[Principal, Depends(requires("assets:write"))]
Reader = Annotated[Principal, Depends(requires("videos:read"))]


@router.post(
    "", response_model=AssetInfo, responses={"5XX": {"model": ProblemBody}}, openapi_extra=UPLOAD_BODY
)
async def create_asset(request: Request, services: ServicesDep, principal: Writer) -> Response:
    """Store an image; the same picture again is the same asset, for seven more days."""
    body = await read_body(request, services.body_rules)
    try:
        scope = await scope_of(request, principal, body.members, body.uploads)
        stored = await find_answer(services, scope)
        if stored is not None:
            return replayed(services, stored)
        taken = await _take_file(services, body)
        try:
            asset_id = await _store(services, principal.account_id, taken)
        finally:
            taken.discard()
    finally:
        body.close()

    def act(conn: Connection) -> Answer:
        return Answer.of(_show(get_image(conn, principal.account_id, asset_id)))

    return await answer_once(services, scope, act)


@router.get("/{asset_id}")
async def get_asset(asset_id: str, services: ServicesDep, principal: Reader) -> AssetInfo:
    """Return an asset and how many videos refer to it."""
    checked_id(asset_id, "asset", "this asset")
    return _show(await services.look(get_image, principal.account_id, asset_id))


@router.delete("/{asset_id}")
async def delete_asset(asset_id: str, services: ServicesDep, principal: Writer) -> AssetDeleted:
    """Hide an asset; its object goes once no video refers to it."""
    checked_id(asset_id, "asset", "this asset")
    await services.read(delete_image, principal.account_id, asset_id)
    log.info("asset_deleted", asset=asset_id, account=principal.account_id)
    return AssetDeleted(id=asset_id)


async def _take_file(services: Services, body: Body) -> Reference:
    """Normalise the one file of the form.

    Raises:
        RefusedError: No file, more than one, something else beside it, or an image that cannot be used.
    """
    problems = list(body.problems)
    problems += [
        Problem(name[:64], "field_unsupported", f"field {name[:64]!a} is not supported; send one {FILE}")
        for name in body.members
    ]
    files = [upload for upload in body.uploads if upload.field == FILE]
    if len(files) != 1 or len(body.uploads) != 1:
        problems.append(
            Problem(FILE, "image_count", f"send exactly one file in {FILE} (got {len(body.uploads)})")
        )
    if problems:
        raise RefusedError(problems)
    image_body = Body({}, uploads=[replace(files[0], field=IMAGE_FIELD)])
    taken = await take_reference(image_body, None, services.image_pool)
    if taken.problems:
        raise RefusedError(
            _named(taken.problems), first=("image_too_large", 413) if taken.is_too_large else None
        )
    return taken


def _named(problems: Sequence[Problem]) -> list[Problem]:
    return [replace(problem, field=FILE) for problem in problems]


async def _store(services: Services, account_id: str, taken: Reference) -> str:
    if taken.image is None:
        raise RuntimeError("an image without problems was not normalised")
    return (await store_image(services, account_id, taken.image))[0]


def _show(image: Image) -> AssetInfo:
    asset = image.asset
    return AssetInfo(
        id=asset.id,
        sha256=asset.sha256,
        width=asset.width or 0,
        height=asset.height or 0,
        bytes=asset.bytes,
        media_type=asset.media_type,
        created_at=int(asset.created_at.timestamp()),
        expires_at=int(asset.expires_at.timestamp()) if asset.expires_at else None,
        refs=image.num_refs,
    )
