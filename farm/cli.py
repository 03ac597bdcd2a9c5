"""`magi2-farm`, the command line of the farm: declare the commands, run one, turn errors into exit codes.

Exit codes: 0 ok, 1 failed job or check, 2 usage, 3 unreachable, 4 refused key, 124 the wait timed out, 130
interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from farm.commands import (
    admin,
    bucket,
    config,
    database,
    demo,
    doctor,
    export,
    groups,
    jobs,
    loadtest,
    profiles,
    roles,
    submit,
    test,
    up,
    webhooks,
)
from farm.commands.console import note
from farm.commands.exits import CommandError, Exit
from farm.embedded.process import EmbeddedError
from farm.errors import FarmError, SettingsError
from farm.storage import StorageError

COMMANDS = (
    demo,
    up,
    test,
    submit,
    jobs,
    groups,
    profiles,
    webhooks,
    roles,
    database,
    admin,
    bucket,
    config,
    doctor,
    loadtest,
    export,
)


class _Parser(argparse.ArgumentParser):
    """Refuses a wrong word in two lines; the whole usage is what `--help` is for."""

    def error(self, message: str) -> NoReturn:
        note(f"{self.prog}: {message}\nsee {self.prog} --help")
        raise SystemExit(Exit.USAGE)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands."""
    parser = _Parser(prog="magi2-farm", description="Render farm for MAGI-2 Preview.")
    parser.add_argument("--version", action="version", version=f"magi2-farm {version('magi2-farm')}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subcommands)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = make_parser().parse_args(words)
    try:
        return int(arguments.run(arguments))
    except CommandError as error:
        return _refuse(error, error.code)
    except (EmbeddedError, StorageError) as error:
        return _refuse(error, Exit.UNREACHABLE)
    except SettingsError as error:
        return _refuse(error, Exit.USAGE)
    except FarmError as error:
        return _refuse(error, Exit.FAILED)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _refuse(error: Exception, code: Exit) -> int:
    note(f"magi2-farm: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
