"""`magi2-farm export openapi`: the API description as JSON, without a running farm."""

import argparse
import secrets
import subprocess
import sys
from pathlib import Path

from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.settings import environment

# In a process of its own: the farm's shared code does not import the web front.
_EXPORT = """
import json
from api.app import create_app
from farm.settings import load_settings
print(json.dumps(create_app(load_settings()).openapi(), indent=2))
"""
ROOT = Path(__file__).resolve().parents[2]


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("export", help="export the API description")
    parser.add_argument("what", choices=("openapi",))
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the OpenAPI document."""
    # Nothing is contacted, so that any address and any secret will do.
    nowhere = {
        "DATABASE_URL": "postgresql://nowhere/farm",
        "REDIS_URL": "redis://nowhere",
        "FARM_SECRET_KEY": secrets.token_hex(32),
        "FARM_KEY_PEPPER": secrets.token_hex(32),
    }
    command = [sys.executable, "-c", _EXPORT]
    exported = subprocess.run(command, cwd=ROOT, env={**nowhere, **environment()}, check=False)
    if exported.returncode != 0:
        raise CommandError("the api package could not describe itself; its message is above")
    return Exit.OK
