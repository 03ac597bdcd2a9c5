"""`magi2-farm loadtest`: many small submits at a fixed rate, and how quickly and how well they were answered.

It is bounded in rate, time and number, asks only this machine unless told otherwise, and cancels every job
that it made, so that nothing is rendered. The requests start at planned instants whatever becomes of the
earlier ones (an open loop), and times count from then: a farm that falls behind cannot hide it.
"""

import argparse
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from farm.commands import connection
from farm.commands.client import FarmClient, Video
from farm.commands.console import note, result_json, table
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands

MAX_RATE_PER_S, MAX_SECONDS, MAX_REQUESTS = 50.0, 300.0, 2_000
THREADS = 32
BODY = {"prompt": "A red fox walks through fresh snow.", "size": "448x256", "num_inference_steps": 1}


@dataclass(frozen=True)
class Answered:
    """What came of one request: how long it took, and what it was refused with, if it was."""

    seconds: float
    video_id: str | None = None
    refusal: CommandError | None = None


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("loadtest", help="submit at a fixed rate, measure, cancel everything")
    parser.add_argument(
        "--rate", type=float, default=1.0, help=f"submits per second, up to {MAX_RATE_PER_S:g}"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help=f"for so long, up to {MAX_SECONDS:g}")
    parser.add_argument("--profile", default="auto", help="the profile to ask for (default: auto)")
    parser.add_argument(
        "--allow-remote", action="store_true", help="let the farm be on another machine than this one"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    connection.add_to(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load the farm; exit 1 if any request was refused or failed."""
    access = connection.access_of(arguments)
    num_requests = checked_load(arguments.rate, arguments.seconds)
    if not arguments.allow_remote and not is_loopback(access.url):
        raise CommandError(
            f"{access.url} is not on this machine; --allow-remote loads it all the same", Exit.USAGE
        )
    with FarmClient(access) as client, ThreadPoolExecutor(THREADS) as pool:
        client.read("/v1/usage")  # a farm that is away, or a wrong key, is told before anything is loaded

        def submit(number: int) -> Video:
            return client.submit({**BODY, "profile": arguments.profile, "seed": number})

        submitted: list[Answered] = []
        read: list[Answered] = []
        try:
            began_s = time.monotonic()
            at_rate(pool, num_requests, arguments.rate, submitted, submit)
            wall_s = time.monotonic() - began_s
            ids = [answer.video_id for answer in submitted if answer.video_id]
            at_rate(pool, len(ids), arguments.rate * 2, read, lambda number: client.get(ids[number]))
        finally:
            left = cancel_all(pool, client, [answer.video_id for answer in submitted if answer.video_id])
    rows = [figures("submit", submitted), figures("read", read)]
    _show(arguments, rows, round(len(submitted) / wall_s, 1), left)
    return Exit.OK if not left and all(row["refused"] == 0 for row in rows) else Exit.FAILED


def checked_load(per_s: float, seconds: float) -> int:
    """Return the number of requests of a load that is within bounds.

    Raises:
        CommandError: It is not; the message says what is allowed.
    """
    if not 0 < per_s <= MAX_RATE_PER_S:
        raise CommandError(
            f"--rate is {per_s:g}; it must be above 0 and up to {MAX_RATE_PER_S:g}", Exit.USAGE
        )
    if not 0 < seconds <= MAX_SECONDS:
        raise CommandError(
            f"--seconds is {seconds:g}; it must be above 0 and up to {MAX_SECONDS:g}", Exit.USAGE
        )
    num_requests = max(1, round(per_s * seconds))
    if num_requests > MAX_REQUESTS:
        raise CommandError(
            f"{per_s:g} a second for {seconds:g} s are {num_requests} requests; at most {MAX_REQUESTS} go",
            Exit.USAGE,
        )
    return num_requests


def is_loopback(url: str) -> bool:
    """Tell whether a URL can only mean this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def at_rate(
    pool: ThreadPoolExecutor,
    num_requests: int,
    per_s: float,
    answers: list[Answered],
    ask: Callable[[int], Video],
) -> None:
    """Start requests at fixed instants and add what becomes of each to `answers`, also if interrupted."""
    began_s = time.monotonic()

    def one(number: int) -> None:
        due_s = began_s + number / per_s
        try:
            video = ask(number)
        except CommandError as error:
            answers.append(Answered(time.monotonic() - due_s, refusal=error))
        else:
            answers.append(Answered(time.monotonic() - due_s, video_id=video["id"]))

    running = []
    try:
        for number in range(num_requests):
            time.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
            running.append(pool.submit(one, number))
    finally:
        wait(running)


def cancel_all(pool: ThreadPoolExecutor, client: FarmClient, ids: Sequence[str]) -> list[str]:
    """Cancel jobs; return those that could not be and have not ended either."""

    def cancel(video_id: str) -> bool:
        try:
            client.cancel(video_id)
        except CommandError as error:
            return error.reason == "already_finished"
        return True

    return [video_id for video_id, is_over in zip(ids, pool.map(cancel, ids), strict=True) if not is_over]


def figures(what: str, answers: Sequence[Answered]) -> dict[str, Any]:
    """Return counts and percentiles of some requests."""
    times_ms = sorted(answer.seconds * 1000 for answer in answers if answer.refusal is None)
    reasons = Counter(answer.refusal.reason or "failed" for answer in answers if answer.refusal)
    return {
        "what": what,
        "requests": len(answers),
        "refused": sum(reasons.values()),
        "p50_ms": _percentile(times_ms, 0.5),
        "p99_ms": _percentile(times_ms, 0.99),
        "reasons": dict(reasons),
    }


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else None


def _show(arguments: argparse.Namespace, rows: list[dict[str, Any]], per_s: float, left: list[str]) -> None:
    if arguments.json:
        result_json({"submits_per_s": per_s, "rows": rows, "not_canceled": left})
        return
    table(("what", "requests", "refused", "p50_ms", "p99_ms", "reasons"), rows)
    for row in rows:
        if "rate_limited" in row["reasons"]:
            note(
                "rate_limited: the account's share of submits a minute is used up; lower --rate or --seconds"
            )
        if "queue_full" in row["reasons"]:
            note("queue_full: the account may have no more waiting jobs; lower --rate or --seconds")
    for video_id in left:
        note(f"{video_id} could not be canceled; `magi2-farm jobs cancel {video_id}` tries again")
