"""`magi2-farm config show`: every setting, its effective value and where it came from."""

import argparse
from dataclasses import asdict

from farm.commands.connection import effective_settings, embedded_variables
from farm.commands.console import result_json, table
from farm.commands.exits import Exit
from farm.commands.parsers import Subcommands
from farm.settings import describe


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("config", help="show the effective settings")
    parser.add_argument("what", choices=("show",))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the settings."""
    lines = [asdict(line) for line in describe(effective_settings(), overrides=embedded_variables())]
    if arguments.json:
        result_json(lines)
    else:
        table(("name", "value", "origin"), lines)
    return Exit.OK
