"""`magi2-farm migrate` and `magi2-farm key`: what is done to the database directly, without the API."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, select
from sqlalchemy.exc import OperationalError

from farm import audit
from farm.accounts import SCOPES, USER_SCOPES, create_key, ensure_account, revoke_key
from farm.commands.connection import effective_settings, remedy
from farm.commands.console import note, result, result_json, table
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.db import schema
from farm.db.session import make_engine, unit_of_work
from farm.db.tables import account, api_key
from farm.settings import Settings

# What may be shown of a key: never its hash.
_COLUMNS = ("id8", "env", "name", "last4", "scopes", "created_at", "expires_at", "last_used_at", "revoked_at")


def add_to(subcommands: Subcommands) -> None:
    """Declare the commands."""
    migrate = subcommands.add_parser("migrate", help="upgrade the database, or say how it stands")
    migrate.add_argument("what", nargs="?", choices=("upgrade", "current", "check"), default="upgrade")
    migrate.set_defaults(run=run_migrate)
    verbs = subcommands.add_parser("key", help="create, list or revoke API keys").add_subparsers(
        dest="verb", required=True
    )
    creating = verbs.add_parser("create", help="make a key and print it, once")
    creating.add_argument("--name", default="", help="what it is for")
    creating.add_argument("--scope", action="append", choices=SCOPES, help="may be given several times")
    creating.add_argument("--admin", action="store_true", help="every scope, those of administrators too")
    creating.set_defaults(run=run_create)
    listing = verbs.add_parser("list", help="all keys of the account")
    listing.set_defaults(run=run_list)
    revoking = verbs.add_parser("revoke", help="close a key for ever")
    revoking.add_argument("id8", help="the eight characters after mk_live_")
    revoking.set_defaults(run=run_revoke)
    for verb in (creating, listing, revoking):
        verb.add_argument("--account", default="default", help="name of the account")
        verb.add_argument("--json", action="store_true", help="print JSON")


@contextmanager
def database() -> Iterator[tuple[Engine, Settings]]:
    """Give an engine on the database of the environment, or of the embedded farm, and the settings."""
    settings = effective_settings()
    engine = make_engine(settings, application="cli")
    try:
        yield engine, settings
    except OperationalError as error:
        raise CommandError(
            f"the database cannot be reached: {type(error.orig).__name__}; {remedy('DATABASE_URL')}",
            Exit.UNREACHABLE,
        ) from None
    finally:
        engine.dispose()


def run_migrate(arguments: argparse.Namespace) -> int:
    """Upgrade, or compare the database with this code."""
    with database() as (engine, _):
        if arguments.what == "upgrade":
            schema.upgrade(engine)
        with engine.connect() as conn:
            current = schema.current_revision(conn)
    newest = schema.newest_revision()
    result(f"{current or 'not migrated'} (newest: {newest})")
    return Exit.OK if arguments.what != "check" or current == newest else Exit.FAILED


def run_create(arguments: argparse.Namespace) -> int:
    """Make a key."""
    if arguments.admin and arguments.scope:
        raise CommandError("--admin means every scope; leave --scope out", Exit.USAGE)
    with database() as (engine, settings):
        if settings.key_pepper is None:
            raise CommandError("FARM_KEY_PEPPER is not set: keys could not be checked", Exit.USAGE)
        with unit_of_work(engine) as conn:
            account_id = ensure_account(conn, arguments.account)
            scopes = SCOPES if arguments.admin else tuple(arguments.scope or USER_SCOPES)
            key = create_key(conn, account_id, settings.key_pepper, name=arguments.name, scopes=scopes)
            after = {"account": account_id, "name": arguments.name, "scopes": scopes}
            audit.record(conn, audit.COMMAND_LINE, "key.create", key.id8, None, after)
    note("This is the only time that the key is shown:")
    if arguments.json:
        result_json({"key": key.text, "id8": key.id8, "account_id": account_id, "scopes": scopes})
    else:
        result(key.text)
    return Exit.OK


def run_list(arguments: argparse.Namespace) -> int:
    """Print the keys of an account."""
    shown = select(*(api_key.c[name] for name in _COLUMNS)).order_by(api_key.c.created_at)
    of_account = shown.join(account).where(account.c.name == arguments.account)
    with database() as (engine, _), engine.connect() as conn:
        keys = [dict(row) for row in conn.execute(of_account).mappings()]
    if arguments.json:
        result_json(keys)
    else:
        table(_COLUMNS, keys)
    return Exit.OK


def run_revoke(arguments: argparse.Namespace) -> int:
    """Close a key."""
    with database() as (engine, _), unit_of_work(engine) as conn:
        account_id = ensure_account(conn, arguments.account)
        is_closed = revoke_key(conn, account_id, arguments.id8)
        if is_closed:
            change = ({"account": account_id, "open": is_open} for is_open in (True, False))
            audit.record(conn, audit.COMMAND_LINE, "key.revoke", arguments.id8, *change)
    if not is_closed:
        raise CommandError(f"account {arguments.account} has no open key {arguments.id8}", Exit.USAGE)
    result(f"{arguments.id8} is revoked")
    return Exit.OK
