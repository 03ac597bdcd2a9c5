"""`magi2-farm bucket`: make the bucket, check that it answers, copy its objects to a folder and back.

Objects never change once written, so an export copies only what the folder lacks and may be repeated. With a
dump of the database, taken before it, the folder is a backup (docs/operations.md).
"""

import argparse
import mimetypes
from pathlib import Path

from farm.commands.connection import effective_settings, remedy
from farm.commands.console import note, result
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.storage import ObjectMissingError, ObjectStore, StorageError

UNFINISHED = ".unfinished"
ANY_TYPE = "application/octet-stream"


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    verbs = subcommands.add_parser("bucket", help="make, check, export or import the bucket").add_subparsers(
        dest="what", required=True, metavar="init|check|export|import"
    )
    verbs.add_parser("init", help="make the bucket with its lifecycle rules")
    verbs.add_parser("check", help="ask whether it answers")
    exporting = verbs.add_parser("export", help="copy all objects into a folder; what is there is kept")
    importing = verbs.add_parser("import", help="copy the objects of such a folder into the bucket")
    for copying in (exporting, importing):
        copying.add_argument("folder", type=Path)
    for verb in verbs.choices.values():
        verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for; exit 3 if the store does not answer."""
    settings = effective_settings()
    store = ObjectStore(settings)
    try:
        if arguments.what == "export":
            result(f"{export_objects(store, arguments.folder)} objects copied to {arguments.folder}")
        elif arguments.what == "import":
            result(f"{import_objects(store, arguments.folder)} objects copied to the bucket")
        else:
            _make_or_check(store, arguments.what)
            result(f"bucket {settings.s3_bucket} is there")
    except StorageError as error:
        raise CommandError(
            f"bucket {settings.s3_bucket}: {error}; {remedy('S3_ENDPOINT_URL, the AWS_* keys')}",
            Exit.UNREACHABLE,
        ) from None
    return Exit.OK


def export_objects(store: ObjectStore, folder: Path) -> int:
    """Copy what the folder lacks, each checked against its digest; return how many objects that were."""
    num_copied = 0
    for key in store.list_keys():
        target = folder / key
        if not target.resolve().is_relative_to(folder.resolve()):
            raise CommandError(f"the key {key} would lead out of {folder}", Exit.FAILED)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(target.name + UNFINISHED)
        try:
            store.get_to_file(key, unfinished)
        except ObjectMissingError:  # retention took it since the list was made
            unfinished.unlink(missing_ok=True)
            continue
        unfinished.rename(target)
        num_copied += 1
    return num_copied


def import_objects(store: ObjectStore, folder: Path) -> int:
    """Put every file of an export under its key; return how many."""
    if not folder.is_dir():
        raise CommandError(f"{folder} is not a folder", Exit.USAGE)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != UNFINISHED]
    for path in files:
        media_type = mimetypes.guess_type(path.name)[0] or ANY_TYPE
        store.put(path.relative_to(folder).as_posix(), path, media_type)
    return len(files)


def _make_or_check(store: ObjectStore, what: str) -> None:
    if what == "init":
        for line in store.ensure_bucket():
            note(line)
    store.check()
