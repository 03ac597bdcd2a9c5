"""`Idempotency-Key`: a POST that is repeated is answered as it was the first time, and does nothing more.

The key may be bare or a quoted string. The answer is looked up before anything is counted, and stored in the
transaction that does the work (`farm/idempotency.py`), sealed, because it may hold a secret that is shown
once. Only what succeeded is stored.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from fastapi import Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from api.deps import Services
from api.multipart import Upload
from farm import idempotency
from farm.accounts import Principal
from farm.db.session import async_unit_of_work
from farm.errors import InvalidFieldError
from farm.idempotency import Scope, Stored
from farm.secretbox import seal, unseal

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
JSON = "application/json"
_VISIBLE = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True)
class Answer:
    """What a POST is answered: a body, headers, and the job that it made, if it made one."""

    body: str
    headers: dict[str, str] = field(default_factory=dict)
    job_id: str | None = None

    @classmethod
    def of(cls, model: BaseModel, **options: Any) -> "Answer":
        """Answer with a model as JSON."""
        return cls(model.model_dump_json(), **options)

    def response(self) -> Response:
        """Make the HTTP answer."""
        return Response(self.body, media_type=JSON, headers=self.headers)


Act = Callable[[Connection], Answer]


async def scope_of(
    request: Request, principal: Principal, members: Any = None, uploads: Sequence[Upload] = ()
) -> Scope | None:
    """Return what the key of a request stands for; None where it has none.

    Raises:
        InvalidFieldError: More than one key, or one that is not 1 to 255 visible ASCII characters.
    """
    given = request.headers.getlist(HEADER)
    if not given:
        return None
    key = given[0].strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if len(given) > 1 or not _VISIBLE.fullmatch(key):
        message = f"{HEADER} must be given once, as 1 to 255 visible ASCII characters without spaces"
        raise InvalidFieldError(HEADER, message)
    route = f"{request.method} {request.scope['route'].path}"
    digests = [f"{upload.field} {await asyncio.to_thread(_digest, upload.file)}" for upload in uploads]
    what = idempotency.fingerprint(route, request.url.path, members, digests)
    return Scope(principal.account_id, route, key, what)


async def find_answer(services: Services, scope: Scope | None) -> Stored | None:
    """Return what the first request of a scope was answered, before anything is counted.

    Raises:
        KeyReusedError: The key came with another request.
    """
    return None if scope is None else await services.look(idempotency.find, scope)


def replayed(services: Services, stored: Stored) -> Response:
    """Give a stored answer again."""
    parts = json.loads(unseal(services.secret_key, stored.answer))
    headers = {**parts["headers"], REPLAYED: "true"}
    return Response(parts["body"], stored.status, headers=headers, media_type=JSON)


async def answer_once(services: Services, scope: Scope | None, act: Act) -> Response:
    """Do the work in one transaction and answer, or give the answer that a twin was given.

    Raises:
        KeyReusedError, InProgressError: As their names say.
        FarmError: From the work; then nothing is stored, and the key stays free.
    """
    async with async_unit_of_work(services.engine) as conn:
        answer = await conn.run_sync(_act_once, services, scope, act)
    return replayed(services, answer) if isinstance(answer, Stored) else answer.response()


async def answer_post(
    request: Request, services: Services, principal: Principal, members: Any, act: Act
) -> Response:
    """Answer a POST whose body was read: once, whatever comes twice."""
    scope = await scope_of(request, principal, members)
    stored = await find_answer(services, scope)
    return replayed(services, stored) if stored else await answer_once(services, scope, act)


def _act_once(conn: Connection, services: Services, scope: Scope | None, act: Act) -> Answer | Stored:
    if scope is None:
        return act(conn)
    stored = idempotency.begin(conn, scope)
    if stored is not None:
        return stored
    answer = act(conn)
    text = json.dumps({"body": answer.body, "headers": answer.headers})
    idempotency.finish(conn, scope, 200, seal(services.secret_key, text), answer.job_id)
    return answer


def _digest(file: IO[bytes]) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(1024 * 1024):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()
