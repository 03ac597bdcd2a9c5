"""`magi2-farm bucket`: make the bucket, or check that it answers."""

import argparse

from farm.commands.console import note, result
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.settings import load_settings
from farm.storage import ObjectStore, StorageError


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("bucket", help="make or check the bucket")
    parser.add_argument("what", choices=("init", "check"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the bucket with its lifecycle rules, or ask for it."""
    settings = load_settings()
    store = ObjectStore(settings)
    try:
        if arguments.what == "init":
            for line in store.ensure_bucket():
                note(line)
        store.check()
    except StorageError as error:
        raise CommandError(
            f"bucket {settings.s3_bucket}: {error}; check S3_ENDPOINT_URL and the AWS_* keys",
            Exit.UNREACHABLE,
        ) from None
    result(f"bucket {settings.s3_bucket} is there")
    return Exit.OK
