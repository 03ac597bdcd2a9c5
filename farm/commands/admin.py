"""`magi2-farm admin`: the logins of the dashboard, made where the database can be reached.

Passwords are read from the terminal without echo, or as one line of standard input; never from an argument,
which every process of the machine could read.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getpass

from farm import admins
from farm.admins import NameTakenError, Role
from farm.audit import COMMAND_LINE
from farm.commands.console import result, result_json, table
from farm.commands.database import database
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.db.session import unit_of_work
from farm.errors import InvalidFieldError

_COLUMNS = ("name", "role", "created_at", "last_login_at", "locked_until", "disabled_at")


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    verbs = subcommands.add_parser("admin", help="logins of the dashboard").add_subparsers(
        dest="verb", required=True
    )
    creating = verbs.add_parser("create", help="make a login; the password is asked for, or read from stdin")
    creating.add_argument("name")
    creating.add_argument("--role", choices=list(Role), type=Role, default=Role.ADMIN)
    creating.set_defaults(run=run_create)
    changing = verbs.add_parser("passwd", help="set a new password, end all sessions, lift a lock")
    changing.add_argument("name")
    changing.set_defaults(run=run_passwd)
    listing = verbs.add_parser("list", help="all logins")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)


def run_create(arguments: argparse.Namespace) -> int:
    """Make a login."""
    with _wrong_words():
        password_hash = admins.hash_password(_read_password())
    with _wrong_words(), database() as (engine, _), unit_of_work(engine) as conn:
        made = admins.create(conn, arguments.name, arguments.role, password_hash, by=COMMAND_LINE)
    result(f"{made.name} may log in at /admin as {made.role}")
    return Exit.OK


def run_passwd(arguments: argparse.Namespace) -> int:
    """Set a new password."""
    with _wrong_words():
        password_hash = admins.hash_password(_read_password())
    with database() as (engine, _), unit_of_work(engine) as conn:
        admins.change_password(conn, arguments.name, password_hash, by=COMMAND_LINE)
    result(f"{arguments.name} has a new password; all of its sessions have ended")
    return Exit.OK


def run_list(arguments: argparse.Namespace) -> int:
    """Print all logins."""
    with database() as (engine, _), engine.connect() as conn:
        rows = [{name: getattr(admin, name) for name in _COLUMNS} for admin in admins.list_admins(conn)]
    if arguments.json:
        result_json(rows)
    else:
        table(_COLUMNS, rows)
    return Exit.OK


@contextmanager
def _wrong_words() -> Iterator[None]:
    """Make what is not allowed a matter of usage, not a failure."""
    try:
        yield
    except (InvalidFieldError, NameTakenError) as error:
        raise CommandError(error.message, Exit.USAGE) from None


def _read_password() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass("Password: ")
    if getpass("Again: ") != password:
        raise CommandError("the two passwords differ; nothing was changed", Exit.USAGE)
    return password
