"""How commands print: results on stdout, what happens meanwhile on stderr.

Nothing here decides what is said. Lines are plain text, so that they can be read by people, logs and scripts.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def note(line: str) -> None:
    """Tell the person who waits."""
    print(line, file=sys.stderr, flush=True)


def result(line: str) -> None:
    """Print what was asked for."""
    print(line, flush=True)


def result_json(value: Any) -> None:
    """Print what was asked for as JSON."""
    print(json.dumps(value, indent=2, default=str), flush=True)


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table, empty cells for missing values."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*("" if row.get(column) is None else str(row[column]) for column in columns))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(shown)
