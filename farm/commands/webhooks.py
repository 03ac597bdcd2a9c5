"""`magi2-farm webhooks`: endpoints, deliveries, and deliveries sent again."""

import argparse

from farm.commands import connection
from farm.commands.client import FarmClient
from farm.commands.console import result, result_json, table
from farm.commands.exits import Exit
from farm.commands.parsers import Subcommands

_ENDPOINT = ("id", "name", "url", "enabled", "event_types")
_DELIVERY = ("id", "event_type", "status", "attempts", "last_status", "last_error")


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    verbs = subcommands.add_parser("webhooks", help="list endpoints or deliveries, or replay").add_subparsers(
        dest="verb", required=True
    )
    listing = verbs.add_parser("list", help="the account's endpoints, or the deliveries of one")
    listing.add_argument("endpoint_id", nargs="?")
    listing.add_argument("--status", help="only deliveries in this status, such as dead")
    listing.set_defaults(run=run_webhooks)
    replaying = verbs.add_parser("replay", help="send one delivery again")
    replaying.add_argument("delivery_id")
    replaying.set_defaults(run=run_replay)
    for verb in (listing, replaying):
        verb.add_argument("--json", action="store_true", help="print JSON")
        connection.add_to(verb)


def run_webhooks(arguments: argparse.Namespace) -> int:
    """Print endpoints or deliveries."""
    with FarmClient(connection.access_of(arguments)) as client:
        columns: tuple[str, ...]
        if arguments.endpoint_id is None:
            columns, rows = _ENDPOINT, client.read("/v1/webhook_endpoints")["data"]
        else:
            path = f"/v1/webhook_endpoints/{arguments.endpoint_id}/deliveries"
            columns, rows = _DELIVERY, client.read(path, status=arguments.status)["data"]
    if arguments.json:
        result_json(rows)
    else:
        table(columns, rows)
    return Exit.OK


def run_replay(arguments: argparse.Namespace) -> int:
    """Send a delivery again."""
    with FarmClient(connection.access_of(arguments)) as client:
        delivery = client.act(f"/v1/webhook_deliveries/{arguments.delivery_id}/replay")
    if arguments.json:
        result_json(delivery)
    else:
        result(f"{delivery['id']} {delivery['status']}")
    return Exit.OK
