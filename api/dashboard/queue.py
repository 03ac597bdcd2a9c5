"""The queue of each profile in its order, and what operators do to a profile."""

from sqlalchemy import Connection

from api.dashboard.changes import Change, Done, change_route
from api.dashboard.pages import Ask, Context, Page
from farm.errors import InvalidFieldError
from farm.jobs.estimates import Queue, queues
from farm.profile_control import (
    FILLS,
    Control,
    get_control,
    list_controls,
    pause_profile,
    resume_profile,
    set_max_queued,
    set_waves,
)
from farm.watch.jobs import MAX_QUEUE, Row, waiting

MAX_REASON = 200


async def load(ask: Ask) -> Context:
    """Read what waits for each profile that has something to show."""
    services = ask.services
    only = ask.word("profile")
    found = await services.look(queues)
    controls = await services.look(list_controls)
    names = sorted({*found, *(name for name, control in controls.items() if control.paused)})
    if only:
        names = [services.profiles.get(only).name]
    lines = []
    for name in names:
        rows = await services.look(waiting, name)
        control = controls.get(name, Control(name))
        estimates = [
            None if control.paused else await services.look(_start_s, services, row, place)
            for place, row in enumerate(rows, 1)
        ]
        lines.append(
            {
                "name": name,
                "queue": found.get(name, Queue()),
                "control": control,
                "rows": list(zip(rows, estimates, strict=True)),
            }
        )
    return {
        "lines": lines,
        "only": only,
        "max_queue": MAX_QUEUE,
        "profiles": list(services.profiles.by_name),
    }


def _start_s(conn: Connection, services: object, row: Row, place: int) -> float | None:
    """Return in how many seconds a waiting job probably starts."""
    estimator = services.estimator  # type: ignore[attr-defined] # api.deps.Services
    clip_s = estimator.clip_s(conn, row.job.profile, str(row.job.params["tier"]), row.job.steps)
    if clip_s is None:
        return None
    wait_s: float = estimator.wait_s(conn, row.job.profile, place, clip_s)
    return wait_s


async def pause(change: Change) -> Done:
    """Let nobody claim jobs of a profile."""
    name = change.services.profiles.get(change.part("profile")).name
    reason = change.word("reason")[:MAX_REASON] or None

    def work(conn: Connection) -> None:
        before = get_control(conn, name)
        after = pause_profile(conn, name, change.visitor.actor, reason)
        change.note(conn, "profile.pause", name, _pause(before), _pause(after))

    await change.services.read(work)
    return Done(f"{name} is paused. What runs is finished; what waits goes on waiting.")


async def resume(change: Change) -> Done:
    """Let jobs of a profile be claimed again."""
    name = change.services.profiles.get(change.part("profile")).name

    def work(conn: Connection) -> None:
        before = get_control(conn, name)
        after = resume_profile(conn, name, change.visitor.actor)
        change.note(conn, "profile.resume", name, _pause(before), _pause(after))

    await change.services.read(work)
    return Done(f"{name} takes jobs again.")


async def limit(change: Change) -> Done:
    """Set how many jobs may wait for a profile."""
    name = change.services.profiles.get(change.part("profile")).name
    value = change.number("max_queued")

    def work(conn: Connection) -> None:
        before = get_control(conn, name)
        after = set_max_queued(conn, name, change.visitor.actor, value)
        was, now_is = {"max_queued": before.max_queued}, {"max_queued": after.max_queued}
        change.note(conn, "profile.limit", name, was, now_is)

    await change.services.read(work)
    return Done(
        f"{name} takes at most {value} waiting jobs." if value is not None else f"{name} has no limit."
    )


async def waves(change: Change) -> Done:
    """Say how waves of a profile form."""
    profile = change.services.profiles.get(change.part("profile"))
    fill = change.word("wave_fill")
    if fill not in FILLS:
        raise InvalidFieldError("wave_fill", f"wave_fill is {fill!r}; use one of {', '.join(FILLS)}")
    size, max_wait_s = change.number("wave_size"), change.number("wave_max_wait_s")

    def work(conn: Connection) -> None:
        by = change.visitor.actor
        before = get_control(conn, profile.name)
        wait_s = before.wave_max_wait_s if max_wait_s is None else max_wait_s
        after = set_waves(conn, profile.name, by, size=size, max_wait_s=wait_s, fill=fill)
        change.note(conn, "profile.waves", profile.name, _waves(before), _waves(after))

    await change.services.read(work)
    return Done(f"Waves of {profile.name} form the new way from the next one on.")


def _pause(control: Control) -> dict[str, object]:
    return {"paused": control.paused, "reason": control.paused_reason}


def _waves(control: Control) -> dict[str, object]:
    return {
        "wave_size": control.wave_size,
        "wave_max_wait_s": control.wave_max_wait_s,
        "wave_fill": control.wave_fill,
    }


PAGES = (Page("/queue", "queue", "queue", load, regions=("queue_lines",)),)
CHANGES = (
    change_route("/profiles/{profile}/pause", pause),
    change_route("/profiles/{profile}/resume", resume),
    change_route("/profiles/{profile}/limit", limit),
    change_route("/profiles/{profile}/waves", waves),
)
