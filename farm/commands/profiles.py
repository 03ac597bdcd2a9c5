"""`magi2-farm profiles`: how each is doing, whether the file is right, and pausing one.

`list` asks the API; `check` reads the file that the settings name, or another; `pause` and `resume` write to
the database, and every claim and submit after that obeys.
"""

import argparse
from pathlib import Path
from typing import Any

from farm import audit
from farm.commands import connection
from farm.commands.client import FarmClient
from farm.commands.console import result, result_json, table
from farm.commands.database import database
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.db.session import unit_of_work
from farm.errors import InvalidFieldError, SettingsError
from farm.profile_control import get_control, pause_profile, resume_profile
from farm.profiles import Profile, load_profiles
from farm.settings import SHIPPED_PROFILES, environment

_DOING = (
    "name",
    "paused",
    "live_groups",
    "idle_groups",
    "queued",
    "oldest_queued_s",
    "clip_s",
    "estimated_start_s",
)
_ROW = ("name", "devices", "ranks", "wave_size", "max_tier", "max_steps", "cache_dit", "warm_up", "spill")


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    verbs = subcommands.add_parser("profiles", help="list, check, pause or resume profiles").add_subparsers(
        dest="verb", required=True
    )
    listing = verbs.add_parser("list", help="groups, queue and estimated start")
    listing.set_defaults(run=run_list)
    connection.add_to(listing)
    checking = verbs.add_parser("check", help="read the file of profiles as every role does")
    checking.add_argument("file", nargs="?", type=Path, help="(default: FARM_PROFILES_FILE)")
    checking.set_defaults(run=run_check)
    pausing = verbs.add_parser("pause", help="let nobody start or submit its jobs; what runs is finished")
    pausing.add_argument("profile")
    pausing.add_argument("--reason", help="shown to whoever submits")
    pausing.set_defaults(run=run_pause)
    resuming = verbs.add_parser("resume", help="let its jobs be started and submitted again")
    resuming.add_argument("profile")
    resuming.set_defaults(run=run_resume, reason=None)
    for verb in (listing, checking, pausing, resuming):
        verb.add_argument("--json", action="store_true", help="print JSON")


def run_list(arguments: argparse.Namespace) -> int:
    """Print how each profile is doing."""
    with FarmClient(connection.access_of(arguments)) as client:
        rows = client.read("/v1/profiles")["data"]
    if arguments.json:
        result_json(rows)
    else:
        table(_DOING, [{**row, "paused": "yes" if row["paused"] else "no"} for row in rows])
    return Exit.OK


def run_check(arguments: argparse.Namespace) -> int:
    """Print the rows of the file; exit 1 with what is wrong if it cannot be used."""
    named = environment().get("FARM_PROFILES_FILE")
    path = arguments.file or Path(named or SHIPPED_PROFILES)
    try:
        profiles = load_profiles(path, named_by="file" if arguments.file else "FARM_PROFILES_FILE")
    except SettingsError as error:
        raise CommandError(str(error), Exit.FAILED) from None
    rows = [_row(profile) for profile in profiles.by_name.values()]
    if arguments.json:
        shown = {"deterministic": profiles.deterministic, "auto": profiles.auto, "profiles": rows}
        result_json(shown)
    else:
        table(_ROW, [{**row, "spill": ", ".join(row["spill"])} for row in rows])
        result(f"{path.name} is right; auto means {', '.join(profiles.auto)}, whichever is served first")
    return Exit.OK


def run_pause(arguments: argparse.Namespace) -> int:
    """Pause a profile."""
    return _set_paused(arguments, paused=True)


def run_resume(arguments: argparse.Namespace) -> int:
    """Resume a profile."""
    return _set_paused(arguments, paused=False)


def _set_paused(arguments: argparse.Namespace, *, paused: bool) -> int:
    name, by = arguments.profile, audit.COMMAND_LINE
    with database() as (engine, settings), unit_of_work(engine) as conn:
        try:
            load_profiles(settings.profiles_file).get(name)
        except InvalidFieldError as error:
            raise CommandError(error.message, Exit.USAGE) from None
        before = get_control(conn, name)
        after = pause_profile(conn, name, by, arguments.reason) if paused else resume_profile(conn, name, by)
        change = {"paused": before.paused}, {"paused": after.paused, "reason": after.paused_reason}
        audit.record(conn, by, "profile.pause" if paused else "profile.resume", name, *change)
    if arguments.json:
        result_json({"profile": name, "paused": after.paused, "paused_reason": after.paused_reason})
    else:
        result(f"{name} is {'paused' if after.paused else 'running'}")
    return Exit.OK


def _row(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "devices": profile.devices,
        "ranks": profile.world,
        "wave_size": profile.wave_size,
        "default_tier": profile.default_tier,
        "max_tier": profile.max_tier,
        "default_steps": profile.default_steps,
        "max_steps": profile.max_steps,
        "execution_timeout_s": profile.execution_timeout_s,
        "cache_dit": profile.cache_dit,
        "warm_up": profile.warm_up,
        "spill": list(profile.spill),
    }
