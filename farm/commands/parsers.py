"""The type that commands add themselves to: argparse has no public name for it."""

from argparse import ArgumentParser
from typing import Protocol


class Subcommands(Protocol):
    """What `ArgumentParser.add_subparsers` returns."""

    def add_parser(self, name: str, *, help: str) -> ArgumentParser:  # noqa: A002 -- argparse's own word
        """Add a command and return its parser."""
