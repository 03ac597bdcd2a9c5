"""`python -m benchmarks.four_gpus.rank`: one process of one stage, a rank or the only one.

Rank 0 writes each row as a line of JSON as soon as it is known, so that a stage that hangs later keeps what
it had. What this machine lacks ends the stage as not run, by its own exit code.
"""

import argparse
import faulthandler
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.stages import BY_NAME
from magi2.config import Launch, ModelConfig
from magi2.contract import TIERS, Tier
from magi2.parallel.layout import Layout

PARTS = ("link", "layout", "speed", "vae", "cache", "loss", "lost", "group", "agent")
MODULES = {
    "link": "link",
    "layout": "layouts",
    "speed": "speed",
    "vae": "decode",
    "cache": "cached",
    "loss": "loss",
    "lost": "loss",
    "group": "farm_group",
    "agent": "farm_agent",
}
NOT_HERE = 3
# So long before its end a stage says where each process stands.
LAST_WORDS_S = 8.0


class NotHereError(Exception):
    """This machine lacks something that the stage needs; the message names it."""


class Rows:
    """Where rank 0 puts what is measured.

    Args:
        path: Of the file; None for the other ranks, whose rows are nobody's.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._begin = time.monotonic()

    def add(self, row: Row) -> None:
        """Write a row and show it."""
        value = "no number" if row.value is None else f"{row.value:.4g} {row.unit}"
        facts = "  ".join(f"{key}={value}" for key, value in row.facts.items())
        self.say(f"{'ok  ' if row.ok else 'MISS'} {row.name}: {value}  {facts}")
        self._write(asdict(row))

    def say(self, text: str) -> None:
        """Show how far the stage is."""
        if self._path is not None:
            print(f"  {time.monotonic() - self._begin:6.1f} s  {text}", flush=True)

    def lack(self, what: str) -> None:
        """Say what this machine lacks."""
        self._write({"not_run": what})

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Place:
    """One process of a stage.

    Args:
        stage: Its name.
        rank, world: Among those of the stage; the only process of one is its rank 0.
        device_type: `cuda` or `cpu`.
        port: Where ranks meet.
        is_tiny: Small sizes.
        limit_s: Of the stage.
        host_bytes: Memory of the host; None means what it says of itself.
        rows: Of the stage.
    """

    stage: str
    rank: int
    world: int
    device_type: str
    port: int
    is_tiny: bool
    limit_s: float
    host_bytes: int | None
    rows: Rows

    @property
    def device(self) -> str:
        """Of this rank, as torch spells it."""
        return "cpu" if self.device_type == "cpu" else f"cuda:{self.rank}"

    @property
    def layout(self) -> Layout:
        """Of the stage."""
        layout = BY_NAME[self.stage].layout
        if layout is None:
            raise ValueError(f"the stage {self.stage} has no layout")
        return layout

    @property
    def launch(self) -> Launch:
        """Where this rank meets the others."""
        return Launch(self.rank, self.world, self.rank, port=self.port)

    @property
    def model(self) -> ModelConfig:
        """The whole model."""
        return ModelConfig.tiny() if self.is_tiny else ModelConfig.released()


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process's part of a stage."""
    parser = argparse.ArgumentParser(description="one process of a stage of the qualification")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--stage", choices=list(BY_NAME), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--host-memory", type=float)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    faulthandler.dump_traceback_later(max(1.0, options.limit - LAST_WORDS_S))
    rows = Rows(options.rows if options.rank == 0 else None)
    place = Place(
        options.stage,
        options.rank,
        options.world,
        options.device,
        options.port,
        options.tiny,
        options.limit,
        None if options.host_memory is None else int(options.host_memory * 2**30),
        rows,
    )
    if options.tiny:
        shrink()
    # Imported here: torch, or the farm's libraries, which not every stage needs.
    module = importlib.import_module(f"benchmarks.four_gpus.{MODULES[options.part]}")
    try:
        getattr(module, f"run_{options.part}")(place)
    except NotHereError as error:
        rows.lack(str(error))
        return NOT_HERE
    return 0


def shrink() -> None:
    """Make both tiers small."""
    TIERS["272p"] = Tier("272p", 64, 64, 2)
    TIERS["540p"] = Tier("540p", 96, 64, 3)


@contextmanager
def needing(*packages: str) -> Iterator[None]:
    """Turn a missing package into a stage that is not run.

    Raises:
        NotHereError: It names the package.
    """
    try:
        for package in packages:
            importlib.import_module(package)
        yield
    except ImportError as error:
        raise NotHereError(f"the package {error.name or error} is not installed") from error


if __name__ == "__main__":
    sys.exit(main())
