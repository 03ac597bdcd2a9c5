"""`magi2-farm api | worker | ticker`: become one role of the farm, started by module name."""

import argparse
import os
import sys

from farm.commands.parsers import Subcommands
from farm.settings import load_settings


def add_to(subcommands: Subcommands) -> None:
    """Declare the three commands."""
    api = subcommands.add_parser("api", help="run the HTTP API")
    api.set_defaults(run=run, module="api")
    worker = subcommands.add_parser("worker", help="run the agent of one group")
    worker.add_argument("--profile", help="profile to serve (default: FARM_WORKER__PROFILE)")
    worker.add_argument(
        "--devices", help="device numbers, separated by commas (default: FARM_WORKER__DEVICES)"
    )
    worker.set_defaults(run=run, module="worker")
    ticker = subcommands.add_parser("ticker", help="run relay, sweeps and the webhook sender")
    ticker.set_defaults(run=run, module="worker.ticker")


def run(arguments: argparse.Namespace) -> int:
    """Check the settings and become the role; returns only if that fails."""
    load_settings()
    given = [(f"--{name}", getattr(arguments, name, None)) for name in ("profile", "devices")]
    options = [word for option, value in given if value is not None for word in (option, value)]
    os.execv(sys.executable, [sys.executable, "-m", arguments.module, *options])  # noqa: S606 -- no shell wanted
