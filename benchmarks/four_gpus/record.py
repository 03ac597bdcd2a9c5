"""What a qualification knows: rows of stages in one JSON file, merged over calls, judged, shown as a table.

Promises: a stage that runs again replaces its own entry and no other's; small sizes are never mixed with
released ones; a row that is wanted and has no number counts as missed, and so does a stage that did not run.
Torch-free.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

FILE_NAME = "qualify_4gpu.json"
FORMAT = 1


class Status(StrEnum):
    """How the run of a stage ended."""

    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        name: Of the row, the same in every run.
        value: The number; None if there is none.
        unit: Of the value.
        target: In words; None if nothing is asked of it.
        ok: Whether the target is met, or what was checked holds.
        facts: Whatever else was seen.
    """

    name: str
    value: float | None
    unit: str = ""
    target: str | None = None
    ok: bool = True
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def has_number(self) -> bool:
        """Whether there is a value; one that is not finite is none."""
        return self.value is not None and abs(self.value) < float("inf")


@dataclass(frozen=True)
class Entry:
    """The newest run of one stage.

    Args:
        status: How it ended.
        why: Of an end that is not `done`.
        seconds: From start to end.
        stamp: Command, commit, machine and versions.
        rows: In the order in which they came, also of a run that failed later.
        evidence: The ends of the ranks' logs, of a run that failed.
    """

    status: Status
    why: str = ""
    seconds: float = 0.0
    stamp: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    evidence: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Entry":
        """Read what `asdict` made."""
        rows = tuple(Row(**row) for row in data["rows"])
        return cls(**{**data, "status": Status(data["status"]), "rows": rows})


class MixError(Exception):
    """The folder holds a record that this run must not be merged with; the message says what to do."""


@dataclass
class Record:
    """All stages of one machine kind."""

    is_tiny: bool
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, is_tiny: bool) -> "Record":
        """Read the record of a folder, or begin one.

        Raises:
            MixError: The record there is of other sizes or of another release.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            return cls(is_tiny)
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT or data["is_tiny"] != is_tiny:
            raise MixError(
                f"{path} holds a record of other sizes or another release: give --out another folder"
            )
        return cls(is_tiny, {name: Entry.from_json(entry) for name, entry in data["stages"].items()})

    def put(self, name: str, entry: Entry, folder: Path) -> None:
        """Replace a stage's entry and write the file, whole or not at all."""
        self.entries[name] = entry
        stages = {name: asdict(entry) for name, entry in sorted(self.entries.items())}
        data = {"format": FORMAT, "is_tiny": self.is_tiny, "stages": stages}
        path, fresh = folder / FILE_NAME, folder / f"{FILE_NAME}.part"
        fresh.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)

    def complaints(self, wanted: dict[str, Sequence[str]]) -> list[str]:
        """Return a line for everything that is missing or missed.

        Args:
            wanted: By stage, the rows that must have a number.
        """
        return [line for name, rows in wanted.items() for line in self._complaints_of(name, rows)]

    def _complaints_of(self, name: str, wanted: Sequence[str]) -> list[str]:
        entry = self.entries.get(name)
        if entry is None:
            return [f"{name}: not run"]
        lines = [] if entry.status is Status.DONE else [f"{name}: {entry.status}: {entry.why}"]
        numbered = {row.name for row in entry.rows if row.has_number}
        lines += [f"{name}: no number for {row!r}" for row in wanted if row not in numbered]
        lines += [f"{name}: missed: {row.name}" for row in entry.rows if not row.ok]
        return lines

    def table(self, names: Iterable[str]) -> str:
        """Return a Markdown table of the stages' rows."""
        lines = ["| stage | what | target | value | |", "|---|---|---|---|---|"]
        for name in names:
            entry = self.entries.get(name, Entry(Status.NOT_RUN))
            rows = [
                f"| {name} | {row.name} | {row.target or '-'} | {_shown(row)} | {_verdict(row)} |"
                for row in entry.rows
            ]
            if entry.status is not Status.DONE:
                rows.append(f"| {name} | - | - | - | {entry.status} |")
            lines += rows
        return "\n".join(lines)


def _shown(row: Row) -> str:
    if row.value is None or not row.has_number:
        return "no number"
    return f"{row.value:.4g} {row.unit}".strip()


def _verdict(row: Row) -> str:
    if not row.ok:
        return "missed"
    return "met" if row.target else ""
