"""What a profile says to a new job.

It is refused while the profile is paused or full, and taken with a sentence where nobody serves the profile
or its account alone can fill no wave. All of it is looked up by the statement that inserts the job, since
every round trip is felt by whoever submits; a job that is refused is undone with its transaction. The limit
of a profile is for operators who want to bound a queue: two submits at one instant may both find room.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Integer,
    Label,
    ScalarSelect,
    bindparam,
    case,
    func,
    literal,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB

from farm.clock import db_now, db_seconds
from farm.db.tables import account, job, profile_control, worker_group
from farm.errors import ProfileFullError, ProfilePausedError
from farm.groups import FRESH_S
from farm.jobs.states import State

NOT_SERVING = ("gone", "sick")


def sentences(profile: str, wave_size: int, max_running: int) -> dict[str, Any]:
    """Return the parameters of `notices` and `facts` that do not come with the job."""
    unserved = f"no worker serves profile {profile} at the moment; the job waits until one does, or expires"
    unfilled = (
        f"profile {profile} runs waves of {wave_size}, and this account may run fewer jobs at a time: "
        "alone it can never fill one"
    )
    return {
        "unserved": [unserved],
        "unfilled": [unfilled],
        "wave_size": wave_size,
        "max_running": max_running,
    }


def notices(given: Mapping[str, BindParameter[Any]]) -> ColumnElement[Any]:
    """Return the job's notices and those of its profile."""
    nothing = literal([], JSONB)
    is_narrow = _max_running(given["account_id"]) < bindparam("wave_size", type_=Integer)
    of_profile = case((_is_served(given["profile"]), nothing), else_=bindparam("unserved", type_=JSONB))
    of_waves = case((is_narrow, bindparam("unfilled", type_=JSONB)), else_=nothing)
    base = given.get("notices")
    together = of_profile.op("||", return_type=JSONB())(of_waves)
    return together if base is None else base.op("||", return_type=JSONB())(together)


def facts(given: Mapping[str, BindParameter[Any]]) -> list[Label[Any]]:
    """Return what `check` needs to know, as columns of the same statement."""
    control = select(profile_control).where(profile_control.c.profile == given["profile"]).subquery()
    waiting = select(func.count()).where(job.c.profile == given["profile"], job.c.state == State.QUEUED)
    is_full = case(
        (control.c.max_queued.is_not(None), waiting.scalar_subquery() >= control.c.max_queued), else_=False
    )
    return [
        select(control.c.paused).scalar_subquery().label("profile_paused"),
        select(control.c.paused_reason).scalar_subquery().label("profile_paused_reason"),
        select(control.c.max_queued).where(is_full).scalar_subquery().label("profile_full"),
    ]


def check(profile: str, found: Mapping[Any, Any]) -> None:
    """Refuse the job that was just inserted; the caller's transaction must not be committed then.

    Raises:
        ProfilePausedError, ProfileFullError: As their names say.
    """
    if found["profile_paused"]:
        raise ProfilePausedError(profile, found["profile_paused_reason"])
    if found["profile_full"] is not None:
        raise ProfileFullError(profile, found["profile_full"])


def _is_served(profile: ColumnElement[Any]) -> ColumnElement[bool]:
    return (
        select(worker_group.c.id)
        .where(worker_group.c.profile == profile, worker_group.c.state.not_in(NOT_SERVING))
        .where(worker_group.c.heartbeat_at > db_now() - db_seconds(FRESH_S))
        .exists()
    )


def _max_running(account_id: ColumnElement[Any]) -> ScalarSelect[Any]:
    own = account.c.limits["max_running"].as_string().cast(Integer)
    default = bindparam("max_running", type_=Integer)
    return select(func.coalesce(own, default)).where(account.c.id == account_id).scalar_subquery()
