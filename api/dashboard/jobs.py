"""Pages of jobs: the search, one job with its whole history, and the preview of a change of many."""

import json
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.dashboard.access import services_of, visitor_of
from api.dashboard.charts import Span
from api.dashboard.pages import Ask, Context, Page
from api.deps import Services
from api.routes.content import through_the_api
from farm.admins import Role
from farm.errors import ContentExpiredError, InvalidFieldError, NotFoundError
from farm.ids import is_id
from farm.jobs.job import Attempt, Event, Job
from farm.jobs.phases import PHASES
from farm.jobs.states import RETRYABLE, State
from farm.progress import decode, progress_key
from farm.quarantine import get_quarantine
from farm.watch.jobs import MAX_BULK, JobSearch, Whole, matching_ids, search, whole

Words = Callable[[str], str]
PER_PAGE = 50
BULK_VERBS = ("cancel", "retry")
FILE_KINDS = {
    "video": ".mp4",
    "thumb": ".jpg",
    "sprite": "-sprite.jpg",
    "audio": ".wav",
    "meta": ".json",
    "input": ".png",
}
# What a worker times as a whole lies between the engine's phases and the upload.
_IN_ORDER = (*PHASES[:-1], "render", "check", PHASES[-1])
# How the form spells groups of states.
STATE_GROUPS = {
    "active": ("starting", "running", "uploading"),
    "ended badly": ("failed", "canceled", "expired"),
}


def search_of(words: Words) -> JobSearch:
    """Read the filters of a form or a query.

    Raises:
        InvalidFieldError: A date or a state is none.
    """
    state = words("state")
    known = [*State, *STATE_GROUPS, ""]
    if state not in known:
        raise InvalidFieldError("state", f"state is {state!r}; use one of {', '.join(filter(None, known))}")
    return JobSearch(
        text=words("q"),
        account=words("account"),
        states=[State(word) for word in STATE_GROUPS.get(state, (state,) if state else ())],
        error_code=words("error"),
        profile=words("profile"),
        group=words("group"),
        since=_date(words("since"), "since"),
        until=_date(words("until"), "until"),
        before_id=words("before"),
        limit=PER_PAGE,
    )


def filters_of(words: Words) -> dict[str, str]:
    """Return the filters as they were given, for links and forms."""
    return {
        name: words(name) for name in ("q", "account", "state", "error", "profile", "group", "since", "until")
    }


async def load_jobs(ask: Ask) -> Context:
    """Search."""
    problem, found = "", None
    try:
        wanted = search_of(ask.word)
        found = await ask.services.look(search, wanted)
    except InvalidFieldError as error:
        problem = error.message
    filters = filters_of(ask.word)
    return {
        "found": found,
        "problem": problem,
        "filters": filters,
        "is_filtered": any(filters.values()),
        "before": ask.word("before"),
        "states": _choices([*State, *STATE_GROUPS], filters["state"]),
        "profiles": _choices(list(ask.services.profiles.by_name), filters["profile"]),
    }


def _choices(known: list[str], given: str) -> list[str]:
    """Return what a form offers, with what was asked for: else it would show "any" instead."""
    return known if not given or given in known else [*known, given]


async def load_bulk(ask: Ask) -> Context:
    """Count what a change of many would touch, before anything is changed."""
    verb = ask.word("do")
    if verb not in BULK_VERBS:
        raise NotFoundError("this kind of change")
    wanted = bulk_search(verb, ask.word)
    ids = await ask.services.look(matching_ids, wanted)
    return {"verb": verb, "filters": filters_of(ask.word), "num": len(ids), "max_bulk": MAX_BULK}


def bulk_search(verb: str, words: Words) -> JobSearch:
    """Return what a change of many is about: what matches and can be changed that way."""
    wanted = search_of(words)
    able = (
        {state for state in State if state in RETRYABLE}
        if verb == "retry"
        else {State.QUEUED, State.STARTING, State.RUNNING, State.UPLOADING}
    )
    states = able & set(wanted.states) if wanted.states else able
    if not states:
        raise InvalidFieldError("state", f"no job in state {words('state')} can be changed by {verb}")
    return JobSearch(
        text=wanted.text,
        account=wanted.account,
        states=sorted(states),
        error_code=wanted.error_code,
        profile=wanted.profile,
        group=wanted.group,
        since=wanted.since,
        until=wanted.until,
    )


async def load_job(ask: Ask) -> Context:
    """Read one job with its history."""
    job_id = ask.part("job_id")
    if not is_id(job_id, "video"):
        raise NotFoundError("this job")
    services = ask.services
    found = await services.look(whole, job_id)
    job = found.job
    estimate = await services.look(services.estimator.estimate, job)
    held = await services.look(get_quarantine, job_id)
    return {
        "whole": found,
        "job": job,
        "now_doing": await _progress(services, job),
        "estimate": estimate,
        "phases": PHASES,
        "stage_times": in_order((job.result or {}).get("stage_durations") or {}),
        "steps": timeline_of(found),
        "spans": spans_of(found),
        "attempts": [attempt_of(each, found, services) for each in found.attempts],
        "curl": curl_of(job, services.settings.base_url),
        "quarantine": held if held is not None and held.released_at is None else None,
        "profiles": list(services.profiles.by_name),
        "can_cancel": not job.is_finished and job.cancel_requested_at is None,
        "can_retry": job.state in RETRYABLE,
        "raw": _raw(found),
    }


async def _progress(services: Services, job: Job) -> dict[str, Any]:
    """Return the newest report: of the broker while it is there and knows more, else of the row."""
    known = {"phase": job.phase, "step": job.step, "total": job.steps, "progress": job.progress}
    if not job.is_active:
        return known
    try:
        text = await services.quick_broker.get(progress_key(job.id))
        report = decode(text) if text else {}
    except (RedisError, OSError, ValueError):
        return known
    if report.get("epoch") != job.epoch or report.get("progress", 0) < job.progress:
        return known
    return {name: report.get(name, value) for name, value in known.items()}


def timeline_of(found: Whole) -> list[dict[str, Any]]:
    """Return the events with the time that passed before each; a long wait of no event shows as a gap."""
    rows: list[dict[str, Any]] = []
    last: Event | None = None
    for event in found.events:
        gap_s = (event.at - last.at).total_seconds() if last else None
        rows.append({"event": event, "gap_s": gap_s, "words": _words(event)})
        last = event
    return rows


def _words(event: Event) -> str:
    """Return what an event says beside its type, on one line."""
    return ", ".join(
        f"{name}: {value}" for name, value in event.data.items() if value not in (None, "", [], {})
    )


def spans_of(found: Whole) -> list[Span]:
    """Return waiting, loading, computing and uploading of all attempts, in order."""
    spans: list[Span] = []
    if not found.events:
        return spans
    origin = found.events[0].at
    last_end: datetime | None = None
    for attempt in found.attempts:
        # Attempts of earlier releases carry the first submit, whatever came before them.
        waiting_since = max(attempt.queued_at, last_end or attempt.queued_at)
        marks = [
            ("waiting", waiting_since, "wait"),
            ("starting", attempt.started_at, "start"),
            ("running", attempt.running_at, "run"),
            ("uploading", attempt.uploading_at, "upload"),
            ("", attempt.ended_at or found.at, ""),
        ]
        known = [(name, at, kind) for name, at, kind in marks if at is not None]
        for (name, begin, kind), (_, end, _) in pairwise(known):
            span = Span(name, (begin - origin).total_seconds(), (end - origin).total_seconds(), kind)
            spans.append(span)
        last_end = attempt.ended_at
    return spans


def attempt_of(attempt: Attempt, found: Whole, services: Services) -> dict[str, Any]:
    """Return an attempt with what it cost."""
    seconds = ((attempt.ended_at or found.at) - attempt.started_at).total_seconds()
    gpu_s = seconds * found.job.gpus
    price = services.settings.worker.price_per_gpu_hour
    error = attempt.error or {}
    detail = error.get("detail") or {}
    return {
        "attempt": attempt,
        "seconds": seconds,
        "gpu_s": gpu_s,
        "cost": None if price is None else gpu_s / 3600 * price,
        "error": error,
        "timings": in_order(attempt.timings or {}),
        "log": log_of(detail),
        "detail": {name: value for name, value in detail.items() if name != "log"},
    }


def in_order(times: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return times of phases as these follow each other, which PostgreSQL does not keep; others come last."""
    place = {name: index for index, name in enumerate(_IN_ORDER)}
    return sorted(times.items(), key=lambda item: place.get(item[0], len(place)))


def log_of(detail: dict[str, Any]) -> str:
    """Return the tail of the engine's log that a failure kept."""
    for name in ("log", "log_tail", "stderr", "traceback"):
        value = detail.get(name)
        if isinstance(value, dict) and value:
            parts = [f"rank {rank}:\n{_lines(lines) or 'no output'}" for rank, lines in value.items()]
            return "\n\n".join(parts)
        if value:
            return _lines(value)
    return ""


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value or "")


def curl_of(job: Job, base_url: str) -> str:
    """Return a command that asks for the same clip again."""
    body: dict[str, Any] = {
        "prompt": job.prompt,
        "resolution": job.params["tier"],
        "num_inference_steps": job.steps,
        "seed": job.seed,
        "profile": job.requested_profile,
    }
    for name in ("output_width", "output_height", "acceleration"):
        if job.params.get(name) not in (None, "off"):
            body[name] = job.params[name]
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return (
        f'curl {base_url}/v1/videos \\\n  -H "Authorization: Bearer $KEY" \\\n'
        f"  -H 'Content-Type: application/json' \\\n  -d {data}"
    )


def _raw(found: Whole) -> dict[str, Any]:
    hidden = {"reuse_key"}
    return {name: getattr(found.job, name) for name in found.job.__dataclass_fields__ if name not in hidden}


def _date(text: str, field: str) -> datetime | None:
    """Read what a date field sends."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidFieldError(field, f"{field} is {text!r}; use a date such as 2026-03-31") from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


async def send_file(request: Request) -> Response:
    """Send an object of a job through the api, so that pages load nothing from elsewhere.

    Raises:
        NotFoundError, ContentExpiredError: As their names say.
    """
    await visitor_of(request, Role.VIEWER)
    job_id, kind = request.path_params["job_id"], request.path_params["kind"]
    if kind not in FILE_KINDS or not is_id(job_id, "video"):
        raise NotFoundError("this file")
    services = services_of(request)
    found = await services.look(whole, job_id)
    asset = found.image if kind == "input" else found.assets.get(kind)
    if asset is None:
        raise NotFoundError("this file")
    if asset.deleted_at is not None:
        raise ContentExpiredError(job_id)
    return await through_the_api(request, services, asset, f"{job_id}{FILE_KINDS[kind]}")


PAGES = (
    Page("/jobs", "jobs", "jobs", load_jobs, regions=("job_list",), every_s=3.0),
    Page("/jobs/bulk", "bulk", "jobs", load_bulk, role=Role.OPERATOR),
    Page(
        "/jobs/{job_id}",
        "job",
        "jobs",
        load_job,
        regions=("job_status", "job_result", "job_attempts", "job_timeline", "job_deliveries"),
        every_s=1.0,
    ),
)
FILES = (Route("/jobs/{job_id}/files/{kind}", send_file, methods=["GET"]),)
