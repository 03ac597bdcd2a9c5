"""`magi2-farm jobs`: list, show, follow, cancel and retry the account's jobs through the public API."""

import argparse
import json

from farm.commands import connection
from farm.commands.client import FINAL_STATUSES, FarmClient, Video
from farm.commands.console import result, result_json, table
from farm.commands.exits import Exit
from farm.commands.parsers import Subcommands

_COLUMNS = ("id", "state", "progress", "profile", "size", "steps", "seed", "created")
_ATTEMPT = ("attempt", "group", "profile", "started_at", "ended_at", "outcome", "error_code")


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    verbs = subcommands.add_parser("jobs", help="list, show, follow, cancel or retry jobs").add_subparsers(
        dest="verb", required=True
    )
    listing = verbs.add_parser("list", help="the newest jobs first")
    listing.add_argument("--state", help="only jobs in this state")
    listing.add_argument("--limit", type=int, default=20, help="at most this many (1-100)")
    showing = verbs.add_parser("show", help="everything about one job")
    canceling = verbs.add_parser("cancel", help="ask for the end of one job")
    retrying = verbs.add_parser("retry", help="queue a job that did not succeed again")
    retrying.add_argument("--profile", help="another way to run it")
    retrying.add_argument("--priority", help="low, normal or high")
    retrying.add_argument("--new-seed", action="store_true", help="draw another seed")
    tailing = verbs.add_parser("tail", help="follow one job until its end")
    for verb, run in (
        (listing, run_list),
        (showing, run_show),
        (canceling, run_cancel),
        (retrying, run_retry),
        (tailing, run_tail),
    ):
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
    """Print one video object and its attempts."""
    with FarmClient(connection.access_of(arguments)) as client:
        video = client.get(arguments.job_id)
        attempts = client.read(f"/v1/videos/{arguments.job_id}/timeline")["attempts"]
    if arguments.json:
        result_json({**video, "attempts": attempts})
    else:
        table(("member", "value"), [{"member": name, "value": value} for name, value in video.items()])
        if attempts:
            table(_ATTEMPT, attempts)
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


def run_retry(arguments: argparse.Namespace) -> int:
    """Queue a job again."""
    wanted = {"profile": arguments.profile, "priority": arguments.priority}
    changes = {name: value for name, value in wanted.items() if value is not None}
    if arguments.new_seed:
        changes["new_seed"] = True
    with FarmClient(connection.access_of(arguments)) as client:
        video = client.retry(arguments.job_id, changes)
    if arguments.json:
        result_json(video)
    else:
        result(f"{video['id']} {video['state']}, seed {video['seed']}")
    return Exit.OK


def run_tail(arguments: argparse.Namespace) -> int:
    """Print what happens to a job; exit 1 if it does not succeed."""
    with FarmClient(connection.access_of(arguments)) as client:
        while True:
            for name, data in client.events(arguments.job_id):
                result(json.dumps({"event": name, **data}) if arguments.json else _line(name, data))
                if name == "done" or (name == "snapshot" and data["status"] in FINAL_STATUSES):
                    return Exit.OK if data["status"] == "completed" else Exit.FAILED


def _line(name: str, data: Video) -> str:
    if name == "progress":
        return f"{data['progress']:3} %  {data['phase']} {data['step']}/{data['total_steps']}"
    return f"{name}  {data.get('state') or data.get('type') or ''}"


def _row(video: Video) -> dict[str, object]:
    return {**video, "steps": video.get("total_steps"), "created": video.get("created_at")}
