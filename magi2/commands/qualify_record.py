"""The records of `qualify`: what was run, one JSON file for each run, and the table of all of them.

Promises: a record appears complete or not at all; one folder holds the runs of one engine, checkpoint and
layout, so that its rows can be compared. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from magi2.contract import TIERS
from magi2.errors import InvalidInput

TABLE = "table.md"
_COLUMNS = (
    "profile",
    "workload",
    "steps",
    "end to end (s)",
    "stages (s)",
    "device peak of each rank (MiB)",
    "host PSS peak (MiB)",
    "frames",
    "samples",
    "probe",
)


@dataclass(frozen=True)
class Run:
    """One of the runs: text or image to video with sound, a tier, a number of steps."""

    workload: str
    tier: str
    num_steps: int

    @property
    def name(self) -> str:
        """What `--only` and the file are called."""
        return f"{self.workload}-{self.tier}-{self.num_steps}"


RUNS = tuple(
    Run(workload, tier, steps) for tier in TIERS for workload in ("t2va", "i2va") for steps in (1, 4, 100)
)


def choose(patterns: Sequence[str]) -> list[Run]:
    """Return the runs whose names fit one of the patterns, or all of them if there are no patterns.

    Raises:
        InvalidInput: A pattern fits no run.
    """
    for pattern in patterns:
        if not any(fnmatchcase(run.name, pattern) for run in RUNS):
            names = ", ".join(run.name for run in RUNS)
            raise InvalidInput(f"--only {pattern} fits no run; there are {names}, and * stands for anything")
    return [run for run in RUNS if not patterns or any(fnmatchcase(run.name, one) for one in patterns)]


class Records:
    """The folder of one profile.

    Args:
        folder: Made if it does not exist.
        identity: What all records of the folder have in common.

    Raises:
        InvalidInput: It holds records of another engine, checkpoint or layout.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        self._identity = dict(identity)
        folder.mkdir(parents=True, exist_ok=True)
        for record in self.read():
            for name, value in identity.items():
                if record.get(name) != value:
                    raise InvalidInput(
                        f"{folder} holds the record {record['run']} with another {name} ({record.get(name)}; "
                        f"now {value}): name another --output, or remove the old records"
                    )

    def clip_path(self, run: Run) -> Path:
        """Return where the clip of a run goes."""
        return self._folder / f"{run.name}.mp4"

    def has(self, run: Run) -> bool:
        """Tell whether a run is recorded."""
        return self._path(run).exists()

    def add(self, run: Run, figures: Mapping[str, Any]) -> str:
        """Keep the record of a run and write the table anew; return its row."""
        record = {
            "run": run.name,
            "workload": run.workload,
            "tier": run.tier,
            "num_inference_steps": run.num_steps,
            **self._identity,
            **figures,
        }
        part = self._path(run).with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        part.replace(self._path(run))
        rows = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *map(_row, self.read())]
        (self._folder / TABLE).write_text("\n".join(rows) + "\n", encoding="utf-8")
        return _row(record)

    def read(self) -> list[dict[str, Any]]:
        """Return the records there are, in the order of the runs."""
        return [
            dict(json.loads(self._path(run).read_text(encoding="utf-8"))) for run in RUNS if self.has(run)
        ]

    def _path(self, run: Run) -> Path:
        return self._folder / f"{run.name}.json"


def _row(record: Mapping[str, Any]) -> str:
    peaks, host = record["peak_device_memory_mb"], record["peak_host_pss_mb"]
    return _line(
        [
            record["profile"],
            f"{record['workload']} {record['tier']}",
            str(record["num_inference_steps"]),
            f"{record['end_to_end_s']:.2f}",
            ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in record["stage_s"].items()),
            "-" if peaks is None else ", ".join(f"{peak:.0f}" for peak in peaks),
            "-" if host is None else f"{host:.0f}",
            record["frames_sha256"],
            record["samples_sha256"],
            "; ".join(record["probe"]["breaches"]) or "ok",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
