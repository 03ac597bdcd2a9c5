"""`probe FILE`: what a finished mp4 is, as JSON, and whether it keeps the contract of the output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from magi2.commands.console import Exit, note, say
from magi2.media.probe import breaches, probe


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    text = "print the facts of an mp4 as JSON; fail if it breaks the contract"
    parser = subcommands.add_parser("probe", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--width", type=int, help="the width that it must have (default: any)")
    parser.add_argument("--height", type=int, help="the height that it must have (default: any)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; 1 if the file breaks the contract."""
    facts = probe(arguments.file)
    say(json.dumps(facts.to_json(), indent=2))
    own_width, own_height = (facts.video.width, facts.video.height) if facts.video else (0, 0)
    found = breaches(facts, arguments.width or own_width, arguments.height or own_height)
    for breach in found:
        note(f"magi2: {arguments.file}: {breach}")
    return Exit.FAILED if found else Exit.OK
