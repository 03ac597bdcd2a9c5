"""`verify-checkpoint DIR`: one report of everything that is wrong with a checkpoint folder, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.filesize import decimal

from magi2.commands.checkpoint_folder import checkpoint_folder
from magi2.commands.console import Exit, counted, say


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    text = "report every missing, truncated, unexpected or misshapen file and tensor of a checkpoint"
    parser = subcommands.add_parser("verify-checkpoint", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="default: MAGI2_CKPT_ROOT")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 if there is a problem."""
    # Imported here: --help does not wait for torch.
    from magi2.checkpoint.verify import verify_checkpoint

    root = checkpoint_folder(arguments.directory)
    report = verify_checkpoint(root)
    for problem in report.problems:
        say(problem)
    read = f"{counted(report.num_files, 'weight and configuration file')}, {decimal(report.num_bytes)}"
    say(f"{root}: {read}, {counted(len(report.problems), 'problem') if report.problems else 'no problem'}")
    return Exit.FAILED if report.problems else Exit.OK
