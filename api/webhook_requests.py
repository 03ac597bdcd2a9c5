"""What every POST of webhook management does once its body was read: check it, act once under a key."""

from collections.abc import Awaitable, Callable, Iterable

from fastapi import Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from api.deps import Services
from api.idempotency import Answer, answer_once, find_answer, replayed, scope_of
from api.problems import RefusedError
from api.webhook_targets import refusal_of
from farm.accounts import Principal
from farm.webhooks.messages import EVENT_TYPES
from magi2.contract import Problem


async def answer(
    request: Request,
    services: Services,
    principal: Principal,
    members: BaseModel | None,
    act: Callable[[Connection], BaseModel],
    check: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Check and act in one transaction, or give the answer that this request got before.

    Args:
        request: May have an Idempotency-Key.
        services: The parts of this process.
        principal: Who asks.
        members: The body, if the call takes one.
        act: Does the work and returns the answer.
        check: Looks outside the database, and is left out where the answer is known.
    """
    given = members.model_dump(exclude_unset=True) if members else None
    scope = await scope_of(request, principal, given)
    stored = await find_answer(services, scope)
    if stored is not None:
        return replayed(services, stored)
    if check is not None:
        await check()
    return await answer_once(services, scope, lambda conn: Answer.of(act(conn)))


async def check_endpoint(services: Services, url: str | None, event_types: Iterable[str]) -> None:
    """Refuse a URL that may not be called and events that there are not, both at once.

    Raises:
        RefusedError: With all problems.
    """
    problems = []
    refusal = await refusal_of(services, url) if url is not None else None
    if refusal is not None:
        problems.append(Problem("url", "invalid_field", f"url: {refusal}"))
    problems += _event_type_problems(event_types, "event_types")
    if problems:
        raise RefusedError(problems)


def check_event_type(event_type: str | None) -> None:
    """Refuse an event that there is not.

    Raises:
        RefusedError: The name is unknown.
    """
    problems = _event_type_problems([event_type] if event_type is not None else [], "event_type")
    if problems:
        raise RefusedError(problems)


def _event_type_problems(event_types: Iterable[str], name: str) -> list[Problem]:
    if all(kind in EVENT_TYPES for kind in event_types):
        return []
    return [Problem(name, "invalid_field", f"{name}: there are only {', '.join(EVENT_TYPES)}")]
