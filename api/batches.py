"""From the body of a batch to checked submissions: defaults merged, seeds expanded, problems by item.

Each item is a submit's body and is checked as one (`api/intake.py`). Nothing is written here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from api.body import Body
from api.deps import Services
from api.intake import Intake, check_webhook, seal_webhook, take_request
from api.members import read_metadata, read_webhook
from api.plain_words import given
from api.problems import RefusedError
from api.schemas import CreatedWebhook
from api.wave_routing import prefer_waves
from farm.accounts import Principal
from farm.errors import ErrorDetail, FarmError
from farm.jobs.submit import JobWebhook
from farm.webhooks.messages import BATCH_COMPLETED
from magi2.contract import Problem
from magi2.values import shown

MAX_ITEMS = 100
MEMBERS = ("items", "defaults", "atomic", "webhook", "metadata")


@dataclass
class Item:
    """One job of a batch: which item of the request asks for it, and its checked request or its error."""

    index: int
    intake: Intake | None = None
    error: FarmError | None = None


@dataclass
class BatchRequest:
    """A checked batch."""

    items: list[Item] = field(default_factory=list)
    is_atomic: bool = True
    metadata: dict[str, str] = field(default_factory=dict)
    webhook: JobWebhook | None = None
    shown_webhook: CreatedWebhook | None = None

    def discard(self) -> None:
        """Remove the temporary files."""
        for item in self.items:
            if item.intake:
                item.intake.discard()


def count_jobs(members: Mapping[str, Any]) -> int:
    """Return for how many jobs a body asks, before anything is checked; 1 where it makes no sense."""
    items = members.get("items")
    if not isinstance(items, list):
        return 1
    seeds = [item.get("seeds") if isinstance(item, dict) else None for item in items]
    return max(1, sum(len(entry) if isinstance(entry, list) else 1 for entry in seeds))


async def take_batch(services: Services, principal: Principal, members: Mapping[str, Any]) -> BatchRequest:
    """Check a whole batch; the caller discards the result.

    Raises:
        RefusedError: The batch itself, or (atomic) at least one item; all problems at once.
    """
    bodies, problems = _expand(members)
    is_atomic = members.get("atomic", True)
    if not isinstance(is_atomic, bool):
        problems.append(
            Problem("atomic", "invalid_field", f"atomic must be true or false (got {shown(is_atomic)})")
        )
    metadata, more = read_metadata(members.get("metadata") or {})
    problems += more
    webhook, more = read_webhook(members.get("webhook"), default_events=(BATCH_COMPLETED,))
    problems += [*more, *await check_webhook(services, webhook)]
    if problems:
        raise RefusedError(problems)
    batch = BatchRequest(is_atomic=is_atomic is True, metadata=metadata)
    batch.webhook, batch.shown_webhook = seal_webhook(services, webhook)
    try:
        for index, body in bodies:
            batch.items.append(await _take_item(services, principal, index, body))
        await prefer_waves(services, principal, [item.intake for item in batch.items if item.intake])
        _share_webhook(batch)
        refused = [item for item in batch.items if item.error]
        if refused and (batch.is_atomic or len(refused) == len(batch.items)):
            raise _all_of(refused)
    except BaseException:
        batch.discard()
        raise
    return batch


def _expand(members: Mapping[str, Any]) -> tuple[list[tuple[int, dict[str, Any]]], list[Problem]]:
    """Return the bodies of all jobs, each with the index of its item."""
    problems = [
        Problem(
            name[:64], "field_unsupported", f"field {name[:64]!a} is not supported; a batch takes {MEMBERS}"
        )
        for name in members
        if name not in MEMBERS
    ]
    defaults = members.get("defaults") or {}
    items = members.get("items")
    if not isinstance(defaults, dict):
        problems.append(
            Problem("defaults", "invalid_field", f"defaults must be an object (got {shown(defaults)})")
        )
    if not isinstance(items, list) or not items:
        got = "" if items is None else f" (got {given(items)})"
        text = f"items must be a list of 1 to {MAX_ITEMS} objects{got}"
        problems.append(Problem("items", "invalid_field", text))
    else:
        problems += [
            Problem(
                f"items[{index}]", "invalid_field", f"items[{index}] must be an object (got {given(item)})"
            )
            for index, item in enumerate(items)
            if not isinstance(item, dict)
        ]
    if problems:
        return [], problems
    if count_jobs(members) > MAX_ITEMS:
        text = f"the batch asks for {count_jobs(members)} videos; at most {MAX_ITEMS} are taken"
        return [], [Problem("items", "invalid_field", text)]
    bodies: list[tuple[int, dict[str, Any]]] = []
    for index, item in enumerate(items or []):
        merged = {**defaults, **item}
        seeds = merged.pop("seeds", None)
        if seeds is None:
            bodies.append((index, merged))
        elif not isinstance(seeds, list) or not seeds or "seed" in merged:
            text = f"items[{index}].seeds must be a list of one or more seeds, without seed beside it"
            problems.append(Problem(f"items[{index}].seeds", "invalid_field", text))
        else:
            bodies += [(index, {**merged, "seed": seed}) for seed in seeds]
    return bodies, problems


async def _take_item(services: Services, principal: Principal, index: int, body: dict[str, Any]) -> Item:
    try:
        return Item(index, await take_request(services, principal, Body(body)))
    except FarmError as exc:
        if exc.http_status >= 500:
            raise
        return Item(index, error=exc)


def _share_webhook(batch: BatchRequest) -> None:
    """Let the batch's webhook hear of each member too, as far as its events say so."""
    webhook = batch.webhook
    if webhook is None:
        return
    of_members = [kind for kind in webhook.event_types if kind != BATCH_COMPLETED]
    batch.webhook = None
    if BATCH_COMPLETED in webhook.event_types:
        batch.webhook = replace(webhook, event_types=[BATCH_COMPLETED])
    for item in batch.items:
        if of_members and item.intake and item.intake.submission.webhook is None:
            own = replace(webhook, event_types=of_members)
            item.intake.submission = replace(item.intake.submission, webhook=own)


def _all_of(refused: list[Item]) -> FarmError:
    """Make one error of those of several items; code and status are the first one's."""
    details = []
    for item in refused:
        error = item.error
        if error is None:
            continue
        own = error.errors or [ErrorDetail(loc="", msg=error.message, type=error.code)]
        details += [
            ErrorDetail(f"items[{item.index}].{detail.loc}".rstrip("."), detail.msg, detail.type)
            for detail in own
        ]
    first = refused[0].error
    code, status = (first.code, first.http_status) if first else ("invalid_field", 422)
    return FarmError(code, status, f"{details[0].loc}: {details[0].msg}", details)
