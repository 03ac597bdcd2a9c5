"""`tiny-checkpoint DIR`: write the random tiny checkpoint, to try the engine without the released weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.filesize import decimal

from magi2.commands.console import Exit, counted, refuse_usage, say


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    text = "write random weights in the released folder layout, small enough for a CPU"
    parser = subcommands.add_parser("tiny-checkpoint", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="a folder that is empty or not there")
    parser.add_argument("--seed", type=int, help="draw other weights than the usual ones")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder."""
    # Imported here: --help does not wait for torch.
    from magi2.checkpoint.tiny import DEFAULT_SEED, write_tiny_checkpoint

    seed = DEFAULT_SEED if arguments.seed is None else arguments.seed
    try:
        write_tiny_checkpoint(arguments.directory, seed=seed)
    except OSError as error:
        return refuse_usage([str(error)])
    files = [path for path in arguments.directory.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    say(f"{arguments.directory}: {counted(len(files), 'file')}, {decimal(num_bytes)}")
    return Exit.OK
