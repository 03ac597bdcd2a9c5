"""The flags of a parallel layout, the same for every command, and the profiles that stand for them.

Torch-free. What a flag means and what cannot be combined is `magi2.parallel.layout`'s business.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from magi2.config import CacheConfig
from magi2.errors import LayoutError
from magi2.parallel.layout import AUTO, UNSUPPORTED, Layout

PROFILES_FILE = Path(__file__).resolve().parents[2] / "profiles.yaml"
_NUMBERS = {
    "tp": "tensor parallel: ranks among which matrices are cut (1, 2, 4)",
    "ulysses": "sequence parallel: ranks among which tokens are cut (1 to 8)",
    "cfg-parallel": "2: each branch has its own ranks",
    "data-parallel": "replicas of a wave (1 to 4)",
    "ep": "ranks among which MoE heads are cut (default: --tp if above 1, else --ulysses)",
    "vae-patch-parallel": "1, or all ranks: spread the video decoder's windows",
}
_SWITCHES = {
    "hsdp": "shard the tensors that are no experts over all ranks",
    "layerwise": "one device, blocks streamed from the host",
    "cpu-offload": "only together with --layerwise",
    "dlo": "distributed layerwise offload, gathered over replicas",
    "dlo-no-allgather": "with --dlo: every rank streams its own blocks",
    "cache-dit": "skip layers in steps that barely change the first one's output (approximate)",
}
LAYOUT_FLAGS = tuple(
    name.replace("-", "_") for name in (*_NUMBERS, *_SWITCHES, "resident-blocks", *UNSUPPORTED)
)


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; none of them has a default, so that a profile shows through."""
    group = parser.add_argument_group("layout")
    for name, text in _NUMBERS.items():
        group.add_argument(f"--{name}", metavar="N", type=int, help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", default=None, help=text)
    text = "blocks that stay on the device while others are streamed: a count or auto"
    group.add_argument("--resident-blocks", metavar="N", type=_count_or_auto, help=text)
    text = "take the layout of a row of profiles.yaml; a flag beside it overrides"
    group.add_argument("--profile", metavar="NAME", help=text)
    for name in UNSUPPORTED:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=argparse.SUPPRESS)


def layout_of(arguments: argparse.Namespace, *, profiles: Path = PROFILES_FILE) -> Layout:
    """Return the layout that the flags and the profile ask for.

    Raises:
        LayoutError: There is no such profile, or a rule is broken; the message names the flags.
    """
    row = profile_row(arguments.profile, profiles) if arguments.profile else {}
    layout = {flag: row[flag] for flag in LAYOUT_FLAGS if flag in row}
    # A profile says who may use the cache; on the command line it is used where the row uses it unasked.
    layout["cache_dit"] = row.get("cache_dit") in {"on", True}  # YAML reads a bare `on` as a boolean
    given = {name: getattr(arguments, name) for name in LAYOUT_FLAGS}
    return Layout.from_flags(layout | {name: value for name, value in given.items() if value is not None})


def cache_of(arguments: argparse.Namespace, *, profiles: Path = PROFILES_FILE) -> CacheConfig:
    """Return when steps may be cached: as the profile says, else the usual.

    Raises:
        LayoutError: There is no such profile, or a number is out of range.
    """
    row = profile_row(arguments.profile, profiles) if arguments.profile else {}
    try:
        return CacheConfig.from_row(row)
    except ValueError as error:
        raise LayoutError(f"--profile {arguments.profile}: {error}") from None


def profile_row(name: str, path: Path = PROFILES_FILE) -> dict[str, Any]:
    """Read a row; the farm checks the rest of the file.

    Raises:
        LayoutError: There is no such profile.
    """
    try:
        rows = dict(yaml.safe_load(path.read_text(encoding="utf-8"))["profiles"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise LayoutError(f"--profile {name}: {path} is no table of profiles: {error}") from None
    if name not in rows:
        raise LayoutError(f"--profile {name}: {path.name} has no such row; there are {', '.join(rows)}")
    return dict(rows[name])


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)
