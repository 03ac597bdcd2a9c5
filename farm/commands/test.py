"""`magi2-farm test`: every tier that needs no GPU, in one pytest run with one closing line."""

import argparse
import subprocess
import sys
from pathlib import Path

from farm.commands.console import note
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.settings import environment

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("unit", "architecture", "golden", "service", "multiprocess", "chaos")
NUM_PROCESSES = 2


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("test", help="run all tests that need no GPU")
    parser.add_argument("pytest_arguments", nargs=argparse.REMAINDER, help="passed to pytest")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run pytest over the tiers."""
    folders = [ROOT / "tests" / tier for tier in TIERS]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise CommandError(
            f"these tiers are missing: {', '.join(missing)}; run it in a clone of the repository"
        )
    note(f"Running {', '.join(TIERS)} on {NUM_PROCESSES} processes")
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(NUM_PROCESSES), "--dist", "worksteal"]
    # One thread per process: two that each take both cores are slower than two that take one each.
    done = subprocess.run(
        [*command, *map(str, folders), *arguments.pytest_arguments],
        cwd=ROOT,
        env={**environment(None), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return Exit.OK if done.returncode == 0 else Exit.FAILED
