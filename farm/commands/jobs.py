"""`magi2-farm jobs`: list, show and cancel the account's jobs through the public API."""

import argparse

from farm.commands import connection
from farm.commands.client import FarmClient, Video
from farm.commands.console import result, result_json, table
from farm.commands.exits import Exit
from farm.commands.parsers import Subcommands

_COLUMNS = ("id", "state", "progress", "profile", "size", "steps", "seed", "created")


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    verbs = subcommands.add_parser("jobs", help="list, show or cancel jobs").add_subparsers(
        dest="verb", required=True
    )
    listing = verbs.add_parser("list", help="the newest jobs first")
    listing.add_argument("--state", help="only jobs in this state")
    listing.add_argument("--limit", type=int, default=20, help="at most this many (1-100)")
    showing = verbs.add_parser("show", help="everything about one job")
    canceling = verbs.add_parser("cancel", help="ask for the end of one job")
    for verb, run in ((listing, run_list), (showing, run_show), (canceling, run_cancel)):
        if verb is not listing:
            verb.add_argument("job_id")
        verb.add_argument("--json", action="store_true", help="print JSON")
        connection.add_to(verb)
        verb.set_defaults(run=run)


def run_list(arguments: argparse.Namespace) -> int:
    """Print one page of jobs."""
    query = {"limit": arguments.limit, "order": "desc"}
    if arguments.state:
        query["state"] = arguments.state
    with FarmClient(connection.access_of(arguments)) as client:
        videos = client.list(query)
    if arguments.json:
        result_json(videos)
    else:
        table(_COLUMNS, [_row(video) for video in videos])
    return Exit.OK


def run_show(arguments: argparse.Namespace) -> int:
    """Print one video object."""
    with FarmClient(connection.access_of(arguments)) as client:
        video = client.get(arguments.job_id)
    if arguments.json:
        result_json(video)
    else:
        table(("member", "value"), [{"member": name, "value": value} for name, value in video.items()])
    return Exit.OK


def run_cancel(arguments: argparse.Namespace) -> int:
    """Ask for the end of a job."""
    with FarmClient(connection.access_of(arguments)) as client:
        video = client.cancel(arguments.job_id)
    if arguments.json:
        result_json(video)
    else:
        result(f"{video['id']} {video['state']}, cancel requested")
    return Exit.OK


def _row(video: Video) -> dict[str, object]:
    return {**video, "steps": video.get("total_steps"), "created": video.get("created_at")}
