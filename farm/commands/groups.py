"""`magi2-farm groups`: the worker groups, and what an operator wishes of them, through the database.

A wish is obeyed by the group's agent with its next heartbeat; the commands do not wait for that.
"""

import argparse
from dataclasses import asdict

from farm import audit
from farm.commands.console import result, result_json, table
from farm.commands.database import database
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.db.session import unit_of_work
from farm.errors import NotFoundError
from farm.groups import GroupStatus, Wish, get_group, list_groups, set_wanted_state

_COLUMNS = ("id", "host", "profile", "devices", "state", "wanted", "job", "busy_1h", "heartbeat", "problem")
_WISHES = {
    "drain": (Wish.DRAINING, "finish what it works on and leave; --now gives the work back at once"),
    "undrain": (None, "take back a drain, or a pause; a group that has left comes back with its worker"),
    "pause": (Wish.PAUSED, "claim nothing more, and stay"),
    "restart": (Wish.RESTARTING, "start its ranks anew between two jobs; a sick group is well again"),
}


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    verbs = subcommands.add_parser("groups", help="list, drain, pause or restart groups").add_subparsers(
        dest="verb", required=True
    )
    listing = verbs.add_parser("list", help="all groups and what they work on")
    listing.add_argument("--gone", action="store_true", help="also those whose agents have left")
    listing.set_defaults(run=run_list)
    for name, (_, purpose) in _WISHES.items():
        wishing = verbs.add_parser(name, help=purpose)
        wishing.add_argument("group_id")
        wishing.set_defaults(run=run_wish, now=False)
        if name == "drain":
            wishing.add_argument("--now", action="store_true", help="do not finish, give the work back")
        wishing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument("--json", action="store_true", help="print JSON")


def run_list(arguments: argparse.Namespace) -> int:
    """Print all groups."""
    with database() as (engine, _), engine.connect() as conn:
        found = list_groups(conn, with_gone=arguments.gone)
    if arguments.json:
        result_json([asdict(group) for group in found])
    else:
        table(_COLUMNS, [_row(group) for group in found])
    return Exit.OK


def run_wish(arguments: argparse.Namespace) -> int:
    """Ask something of a group."""
    wanted = Wish.LEAVING if arguments.now else _WISHES[arguments.verb][0]
    with database() as (engine, _), unit_of_work(engine) as conn:
        try:
            before = get_group(conn, arguments.group_id)
        except NotFoundError:
            known = ", ".join(group.id for group in list_groups(conn, with_gone=False)) or "none"
            text = f"there is no group {arguments.group_id}; those that are there: {known}"
            raise CommandError(text, Exit.USAGE) from None
        after = set_wanted_state(conn, arguments.group_id, wanted, audit.COMMAND_LINE)
        change = {"wanted_state": before.wanted_state}, {"wanted_state": after.wanted_state}
        audit.record(conn, audit.COMMAND_LINE, f"group.{arguments.verb}", after.id, *change)
    if arguments.json:
        result_json(asdict(after))
    else:
        result(f"{after.id} is {after.state}, wanted: {after.wanted_state or 'nothing'}")
    return Exit.OK


def _row(group: GroupStatus) -> dict[str, object]:
    return {
        "id": group.id,
        "host": group.host,
        "profile": group.profile,
        "devices": group.devices,
        "state": group.state if group.is_live or group.state == "gone" else f"{group.state}, silent",
        "wanted": group.wanted_state,
        "job": " ".join(f"{held.id} {held.progress}%" for held in group.jobs),
        "busy_1h": group.stats.get("busy_1h"),
        "heartbeat": group.heartbeat_at.isoformat(timespec="seconds"),
        "problem": group.stats.get("sick_reason") or group.stats.get("problem"),
    }
