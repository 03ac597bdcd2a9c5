"""What operators do to jobs: one, many of a search, or all that wait for a profile.

Everything goes through `farm/jobs/control.py`, as the owner's own calls do, and each job gets an audit entry.
A change of many is done in small transactions; what cannot be changed any more is left out and counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection

from api.dashboard.access import ROOT
from api.dashboard.changes import Change, Done, change_route
from api.dashboard.jobs import BULK_VERBS, bulk_search
from api.intake import resolve_profile
from api.routes.actions import again_for
from farm import quarantine
from farm.errors import FarmError, InvalidFieldError, NotFoundError
from farm.ids import is_id
from farm.jobs.control import (
    Again,
    Changes,
    change_queued,
    delete_job,
    quarantine_job,
    request_cancel,
    reroute,
    retry,
)
from farm.jobs.job import Job
from farm.jobs.queries import get_job
from farm.profiles import Profile
from farm.watch.jobs import MAX_BULK, matching_ids, owner_of, waiting_ids
from magi2.contract import draw_seed

MIN_PRIORITY, MAX_PRIORITY = -10, 10
BATCH = 25
One = Callable[[Connection, str, str], Any]


def state_of(job: Job) -> dict[str, Any]:
    """Return what changes of a job are about, for the audit log."""
    return {
        "state": job.state.value,
        "priority": job.priority,
        "profile": job.profile,
        "cancel_requested_at": job.cancel_requested_at,
        "deleted_at": job.deleted_at,
        "retry_count": job.retry_count,
    }


def _job_id(change: Change) -> str:
    job_id = change.part("job_id")
    if not is_id(job_id, "video"):
        raise NotFoundError("this job")
    return job_id


async def _on_one(change: Change, action: str, act: One, said: str, to: str | None = None) -> Done:
    """Change one job and write down how it was and how it is."""
    job_id = _job_id(change)

    def work(conn: Connection) -> Job:
        owner = owner_of(conn, job_id)
        before = get_job(conn, owner, job_id)
        after: Job = act(conn, owner, job_id)
        change.note(conn, action, job_id, state_of(before), state_of(after))
        return after

    after = await change.services.read(work)
    return Done(said, to, {"id": job_id, "state": after.state.value})


async def cancel(change: Change) -> Done:
    """Cancel a job."""
    by = change.visitor.actor
    said = "Canceled. A running job stops at its next step."
    return await _on_one(
        change, "job.cancel", lambda conn, owner, job_id: request_cancel(conn, owner, job_id, by), said
    )


async def retry_one(change: Change) -> Done:
    """Queue an ended job again, perhaps on another profile, with another priority or seed."""
    other = await resolve_profile(change.services, change.word("profile")) if change.word("profile") else None
    priority = _priority(change.word("priority")) if change.word("priority") else None
    seed = draw_seed() if change.word("new_seed") in {"on", "true", "1"} else None

    def act(conn: Connection, owner: str, job_id: str) -> Job:
        return _retry(conn, change, owner, job_id, other, Again(priority=priority, seed=seed))

    return await _on_one(change, "job.retry", act, "Queued again with a new budget of attempts.")


def _retry(
    conn: Connection, change: Change, owner: str, job_id: str, other: Profile | None, wanted: Again
) -> Job:
    found = get_job(conn, owner, job_id)
    again = again_for(conn, change.services, found, other, wanted)
    return retry(conn, owner, job_id, again, rules=change.services.settings.rules())


async def delete(change: Change) -> Done:
    """Delete a job for its owner."""
    by = change.visitor.actor
    said = "Deleted. Its owner does not see it any more; its files are removed by the next sweep."
    return await _on_one(
        change,
        "job.delete",
        lambda conn, owner, job_id: delete_job(conn, owner, job_id, by),
        said,
        f"{ROOT}/jobs",
    )


async def set_priority(change: Change) -> Done:
    """Move a waiting job up or down."""
    if change.word("by"):
        step = _number(change.word("by"))
    else:
        step, fixed = 0, _priority(change.word("priority"))

    def act(conn: Connection, owner: str, job_id: str) -> Job:
        if not change.word("by"):
            return change_queued(conn, owner, job_id, Changes(priority=fixed))
        now_is = get_job(conn, owner, job_id).priority
        moved = min(max(now_is + step, MIN_PRIORITY), MAX_PRIORITY)
        return change_queued(conn, owner, job_id, Changes(priority=moved))

    return await _on_one(
        change, "job.priority", act, "Moved. One point of priority is a head start of ten minutes."
    )


async def move_to(change: Change) -> Done:
    """Let another profile run a waiting job."""
    profile = change.services.profiles.get(change.word("profile"))

    def act(conn: Connection, owner: str, job_id: str) -> Job:
        found = get_job(conn, owner, job_id)
        return reroute(conn, owner, job_id, again_for(conn, change.services, found, profile, Again()))

    return await _on_one(change, "job.reroute", act, f"Moved to the queue of {profile.name}.")


async def put_in_quarantine(change: Change) -> Done:
    """Keep a job from being started again."""
    by, note = change.visitor.actor, change.word("note")

    def act(conn: Connection, _: str, job_id: str) -> Job:
        return quarantine_job(conn, job_id, by, note)

    return await _on_one(
        change, "job.quarantine", act, "In quarantine. It can be retried after a release only."
    )


async def release(change: Change) -> Done:
    """Let a job be retried again."""
    job_id, by = _job_id(change), change.visitor.actor

    def work(conn: Connection) -> None:
        before = quarantine.get_quarantine(conn, job_id)
        quarantine.release(conn, job_id, by)
        was = (
            None if before is None else {"reason": before.reason, "released": before.released_at is not None}
        )
        change.note(conn, "job.release", job_id, was, {"released": True})

    await change.services.read(work)
    return Done("Released. Nothing is started by that; retry it when you are ready.", members={"id": job_id})


async def bulk(change: Change) -> Done:
    """Cancel or retry what a search finds, after a page has shown how many that is."""
    verb = change.word("do")
    if verb not in BULK_VERBS:
        raise InvalidFieldError("do", f"do is {verb!r}; use one of {', '.join(BULK_VERBS)}")
    wanted = bulk_search(verb, change.word)
    targets = (await change.services.look(matching_ids, wanted))[:MAX_BULK]
    by = change.visitor.actor

    def act(conn: Connection, owner: str, job_id: str) -> Job:
        if verb == "cancel":
            return request_cancel(conn, owner, job_id, by)
        return _retry(conn, change, owner, job_id, None, Again())

    num_done = await _on_many(change, f"job.{verb}", targets, act)
    word = "canceled" if verb == "cancel" else "queued again"
    said = _counted(num_done, len(targets), word)
    return Done(said, f"{ROOT}/jobs", {"changed": num_done, "found": len(targets)})


async def purge(change: Change) -> Done:
    """Cancel everything that waits for a profile; its name must be typed."""
    profile = change.part("profile")
    if change.word("confirm") != profile:
        raise InvalidFieldError(
            "confirm", f"nothing was purged: type the name of the profile, {profile}, to confirm"
        )
    targets = await change.services.look(waiting_ids, profile)
    by = change.visitor.actor

    def act(conn: Connection, owner: str, job_id: str) -> Job:
        return request_cancel(conn, owner, job_id, by)

    num_done = await _on_many(change, "job.cancel", targets, act)
    await change.services.read(
        lambda conn: change.note(
            conn, "queue.purge", profile, {"queued": len(targets)}, {"canceled": num_done}
        )
    )
    said = _counted(num_done, len(targets), "canceled")
    return Done(said, members={"changed": num_done, "found": len(targets)})


async def _on_many(change: Change, action: str, targets: Sequence[tuple[str, str]], act: One) -> int:
    """Change jobs in small transactions; return how many were changed."""
    num_done = 0
    for start in range(0, len(targets), BATCH):
        batch = targets[start : start + BATCH]

        def work(conn: Connection, batch: Sequence[tuple[str, str]] = batch) -> int:
            return sum(_try(conn, change, action, target, act) for target in batch)

        num_done += await change.services.read(work)
    return num_done


def _try(conn: Connection, change: Change, action: str, target: tuple[str, str], act: One) -> bool:
    job_id, owner = target
    try:
        with conn.begin_nested():
            before = get_job(conn, owner, job_id)
            after: Job = act(conn, owner, job_id)
            change.note(conn, action, job_id, state_of(before), state_of(after))
    except FarmError:
        return False
    return True


def _counted(num_done: int, num_found: int, word: str) -> str:
    jobs = "job" if num_done == 1 else "jobs"
    left = num_found - num_done
    rest = f"; {left} could not be changed any more" if left else ""
    return f"{num_done} {jobs} {word}{rest}."


def _priority(text: str) -> int:
    value = _number(text)
    if not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidFieldError("priority", f"priority is {value}; use {MIN_PRIORITY} to {MAX_PRIORITY}")
    return value


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidFieldError("priority", f"priority is {text!r}; use a whole number") from None


CHANGES = (
    change_route("/jobs/bulk", bulk),
    change_route("/jobs/{job_id}/cancel", cancel),
    change_route("/jobs/{job_id}/retry", retry_one),
    change_route("/jobs/{job_id}/delete", delete),
    change_route("/jobs/{job_id}/priority", set_priority),
    change_route("/jobs/{job_id}/reroute", move_to),
    change_route("/jobs/{job_id}/quarantine", put_in_quarantine),
    change_route("/jobs/{job_id}/release", release),
    change_route("/queue/{profile}/purge", purge),
)
