"""API keys over HTTP: list, create, rotate, revoke. The text of a key is in one answer and nowhere else."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import Connection

from api.auth import KeyCache, requires
from api.deps import ServicesDep
from api.idempotency import Answer, answer_post
from api.json_body import body_of, read_model
from api.schemas import ProblemBody
from api.service_schemas import (
    ApiKey,
    ApiKeyCreate,
    ApiKeyList,
    ApiKeyRevoked,
    ApiKeyRotate,
    ApiKeyWithText,
)
from farm import keys
from farm.accounts import NewKey, Principal, key_problems, parse_key
from farm.errors import NotFoundError
from farm.keys import Key, KeyWish
from magi2.contract import Problem
from magi2.values import shown

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/keys", tags=["keys"], responses={"4XX": {"model": ProblemBody}})

DEFAULT_ENV = "live"
Manager = Annotated[Principal, Depends(requires("keys:manage"))]


@router.get("")
async def list_keys(services: ServicesDep, principal: Manager) -> ApiKeyList:
    """Return all keys of the account, also those that have ended."""
    found = await services.look(keys.list_keys, principal.account_id)
    return ApiKeyList(data=[ApiKey(**_members(key)) for key in found])


@router.post("", response_model=ApiKeyWithText, openapi_extra=body_of(ApiKeyCreate))
async def create_key(request: Request, services: ServicesDep, principal: Manager) -> Response:
    """Make a key; the answer is the only place that shows its text."""
    body = await read_model(request, services, ApiKeyCreate, check=_problems)
    wish = KeyWish(body.name, body.scopes, body.cidrs, body.expires_at)

    def act(conn: Connection) -> Answer:
        made = keys.create(
            conn, principal, services.key_pepper, wish, env=_env_of(request), ip=_ip_of(request)
        )
        return _with_text(principal, *made)

    return await answer_post(request, services, principal, body.model_dump(mode="json"), act)


@router.post("/{key_id}/rotate", response_model=ApiKeyWithText, openapi_extra=body_of(ApiKeyRotate))
async def rotate_key(key_id: str, request: Request, services: ServicesDep, principal: Manager) -> Response:
    """Make a key that may do the same; the old one ends after the overlap."""
    body = await read_model(request, services, ApiKeyRotate)

    def act(conn: Connection) -> Answer:
        overlap_s = body.overlap_seconds
        pepper, ip = services.key_pepper, _ip_of(request)
        made = keys.rotate(conn, principal, pepper, key_id, overlap_s=overlap_s, ip=ip)
        return _with_text(principal, *made)

    answer = await answer_post(request, services, principal, body.model_dump(), act)
    _forget(request, key_id)
    return answer


@router.delete("/{key_id}")
async def delete_key(
    key_id: str, request: Request, services: ServicesDep, principal: Manager
) -> ApiKeyRevoked:
    """Revoke a key: at once in this process, within five seconds in every other."""
    if not key_id.isascii():
        raise NotFoundError(f"key {shown(key_id)}")
    ip = _ip_of(request)
    await services.read(lambda conn: keys.revoke(conn, principal, key_id, ip=ip))
    _forget(request, key_id)
    log.info("key_revoked", key=key_id, account=principal.account_id, by=principal.key_id)
    return ApiKeyRevoked(id=key_id)


def _forget(request: Request, key_id: str) -> None:
    cache: KeyCache = request.app.state.key_cache
    cache.forget(key_id)


def _ip_of(request: Request) -> str | None:
    return request.client.host if request.client else None


def _env_of(request: Request) -> str:
    """Return the environment that the asking key names; a new key belongs to the same."""
    text = request.headers.get("authorization", "").partition(" ")[2] or request.headers.get("x-api-key", "")
    key = parse_key(text.strip())
    return key.env if key else DEFAULT_ENV


def _with_text(principal: Principal, key: Key, new: NewKey) -> Answer:
    log.info("key_made", key=key.id8, account=principal.account_id, by=principal.key_id)
    return Answer.of(ApiKeyWithText(**_members(key), key=new.text))


def _problems(raw: Mapping[str, Any]) -> list[Problem]:
    found = key_problems(_texts(raw.get("scopes")), _texts(raw.get("cidrs")))
    problems = [Problem(name, "invalid_field", text) for name, text in found]
    if "\0" in str(raw.get("name", "")):
        problems.append(Problem("name", "invalid_field", "name holds NUL (U+0000); remove it"))
    return problems


def _texts(value: object) -> list[str]:
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _members(key: Key) -> dict[str, Any]:
    return {
        "id": key.id8,
        "name": key.name,
        "hint": f"mk_{key.env}_{key.id8}...{key.last4}",
        "scopes": key.scopes,
        "cidrs": key.cidrs,
        "created_at": _unix(key.created_at),
        "expires_at": _unix(key.expires_at),
        "revoked_at": _unix(key.revoked_at),
        "last_used_at": _unix(key.last_used_at),
    }


def _unix(at: datetime | None) -> int | None:
    return int(at.timestamp()) if at else None
