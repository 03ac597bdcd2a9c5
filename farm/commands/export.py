"""`magi2-farm export openapi`: the API description as JSON, without a running farm."""

import argparse
import subprocess
import sys

from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands

# In a process of its own: the farm's shared code does not import the web front.
_EXPORT = "import json; from api.app import openapi_document; print(json.dumps(openapi_document(), indent=2))"


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("export", help="export the API description")
    parser.add_argument("what", choices=("openapi",))
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the OpenAPI document."""
    exported = subprocess.run([sys.executable, "-c", _EXPORT], check=False)
    if exported.returncode != 0:
        raise CommandError("the api package could not describe itself; its message is above")
    return Exit.OK
