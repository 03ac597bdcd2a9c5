"""Which files of a golden folder belong to which set, and a register of the files that no rule claims.

A golden folder holds up to three sets, `dit/`, `vae/` and `pipeline/`; an absent set has no cases. Each
test module of a set names its files by regular expressions over the file name, at any depth below the set's
folder (`FILES`), so that another folder of the same form runs unchanged. A file that none claims is an error.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# Sets of later releases: known, and left alone (the 1080p refiner is not part of the product yet).
LATER_SETS = frozenset({"refiner"})
NOT_DATA = re.compile(r"README\.md|.*\.py|.*\.pyc")


def files_of(golden_dir: Path, set_name: str) -> list[Path]:
    """Every data file below one set's folder, in a fixed order; none when the folder is absent."""
    root = golden_dir / set_name
    return (
        sorted(p for p in root.rglob("*") if p.is_file() and not NOT_DATA.fullmatch(p.name))
        if root.is_dir()
        else []
    )


def matching(golden_dir: Path, set_name: str, pattern: str) -> list[Path]:
    """The files of a set whose whole name fits `pattern`."""
    return [p for p in files_of(golden_dir, set_name) if re.fullmatch(pattern, p.name)]


def unclaimed(golden_dir: Path, set_name: str, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the files that no pattern claims; a pattern with a slash is matched against the relative path."""
    compiled = [re.compile(p) for p in patterns]
    for path in files_of(golden_dir, set_name):
        relative = path.relative_to(golden_dir / set_name).as_posix()
        if not any(c.fullmatch(relative) if "/" in c.pattern else c.fullmatch(path.name) for c in compiled):
            yield path


def strangers(golden_dir: Path, sets: Iterable[str]) -> list[Path]:
    """Entries at the top of a golden folder that are neither a known set nor a note nor test code."""
    known = set(sets) | LATER_SETS | {"__pycache__"}
    return [p for p in sorted(golden_dir.iterdir()) if p.name not in known and not NOT_DATA.fullmatch(p.name)]
