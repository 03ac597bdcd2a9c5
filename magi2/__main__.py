"""`python -m magi2`: declare the commands, run one, turn failures into exit codes.

Exit codes: 0 ok, 1 failed, 2 the request or the command line breaks a rule, 130 interrupted, 143 terminated.
Torch is loaded only by the commands that compute.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from magi2.commands import generate, plan, probe, qualify, tiny_checkpoint, verify_checkpoint
from magi2.commands.console import Exit, refuse, refuse_usage
from magi2.commands.interrupts import ignore_signals, take_signals, tell_interrupt
from magi2.config import engine_environment, wait_passively
from magi2.errors import EngineFailure

COMMANDS = (generate, plan, qualify, tiny_checkpoint, verify_checkpoint, probe)


class _Parser(argparse.ArgumentParser):
    """Refuses a wrong word in two lines; the whole usage is what `--help` is for."""

    def parse_known_args(  # type: ignore[override] # of three overloads the one that is used
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is left over where it is found, so that the command's own help is named."""
        known, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return known, extra

    def error(self, message: str) -> NoReturn:
        refuse_usage([message, f"see {self.prog} --help"])
        raise SystemExit(Exit.USAGE)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands."""
    text = "MAGI-2 Preview: ten seconds of video with sound from a prompt, and an image if you like."
    parser = _Parser(prog="python -m magi2", description=text)
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subcommands)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = make_parser().parse_args(words)
        wait_passively()
        try:
            engine_environment()
        except ValueError as error:
            return refuse_usage([str(error)])
        return int(arguments.run(arguments))
    except EngineFailure as failure:
        return refuse(failure)
    except KeyboardInterrupt as interrupt:
        return tell_interrupt(interrupt)


if __name__ == "__main__":
    take_signals()
    exit_code = main()
    ignore_signals()
    sys.exit(exit_code)
