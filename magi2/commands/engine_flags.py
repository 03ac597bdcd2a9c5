"""The flags that say with which engine a command renders: checkpoint, device, dtype, layout, measuring.

Promises: what can be refused without weights is refused here, on every rank alike. Under `torchrun`
all ranks run the same command.
"""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from magi2.commands.checkpoint_folder import checkpoint_folder
from magi2.commands.console import note
from magi2.commands.layout_flags import add_layout_flags, cache_of, layout_of, profile_row
from magi2.config import DTYPES, EngineConfig, Launch, engine_environment, read_launch
from magi2.contract import Problem
from magi2.errors import InvalidInput, LayoutError
from magi2.host_memory import PeakPss
from magi2.parallel.layout import Layout, check


@dataclass(frozen=True)
class Setup:
    """A checked engine of one rank, before anything is loaded."""

    engine: EngineConfig
    layout: Layout
    launch: Launch


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="default: MAGI2_CKPT_ROOT")
    parser.add_argument("--device", help="as torch spells it (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help=f"of the large matrices (default: the profile's, else {DTYPES[0]})"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="refuse operations without a form that repeats bit for bit (also MAGI2_DETERMINISTIC=1)",
    )
    add_layout_flags(parser)


def is_deterministic(arguments: argparse.Namespace) -> bool:
    """Return the setting of flag or environment."""
    return arguments.deterministic or bool(engine_environment().deterministic)


def read_setup(arguments: argparse.Namespace) -> Setup:
    """Check the engine that the flags ask for.

    Raises:
        InvalidInput: No checkpoint was named, or there is no such device.
        LayoutError: The layout cannot work, or not with the ranks that were launched.
    """
    root, launch = checkpoint_folder(arguments.checkpoint), _launch()
    layout = _layout(arguments, root, launch)
    profile = profile_row(arguments.profile) if arguments.profile else {}
    engine = EngineConfig(
        checkpoint=root,
        device=_device(arguments.device, launch),
        dtype=arguments.dtype or profile.get("dtype", DTYPES[0]),
        deterministic=is_deterministic(arguments),
        cache=cache_of(arguments),
        flash_attn_version=engine_environment().flash_attn_version,
    )
    return Setup(engine, layout, launch)


def measuring(launch: Launch, *, is_wanted: bool) -> AbstractContextManager[PeakPss | None]:
    """Sample host memory while the block runs, if wanted, on the first rank.

    Under a launcher the tree is the launcher's, so that all ranks count.
    """
    if not is_wanted or launch.rank:
        return nullcontext()
    return PeakPss(os.getpid() if launch.world == 1 else os.getppid())


def _launch() -> Launch:
    try:
        return read_launch()
    except ValueError as error:
        raise LayoutError(str(error)) from error


def _layout(arguments: argparse.Namespace, root: Path, launch: Launch) -> Layout:
    """Check the layout against this release, the model's sizes and the launched ranks."""
    layout = layout_of(arguments)
    # Imported here: a broken rule does not wait for the reader of checkpoints.
    from magi2.checkpoint.index import read_model_config
    from magi2.sampling.cache import missing_package  # as above

    if layout.cache_dit and (why := missing_package()):
        raise LayoutError(f"--cache-dit: {why}")
    check(layout, read_model_config(root))
    if launch.world != layout.world:
        raise LayoutError(_how_to_launch(layout, launch.world, arguments.command))
    if layout.warning and launch.rank == 0:
        note(f"magi2: {layout.warning}")
    return layout


def _how_to_launch(layout: Layout, launched: int, command: str) -> str:
    needed = "1 rank is" if layout.world == 1 else f"{layout.world} ranks are"
    told = f"layout {layout}: {needed} needed, {launched} {'was' if launched == 1 else 'were'} launched: "
    if layout.world > 1:
        return f"{told}torchrun --nproc-per-node {layout.world} -m magi2 {command} ..."
    return f"{told}name a layout, such as --ulysses {launched}, or run python -m magi2 {command} ..."


def _device(given: str | None, launch: Launch) -> str:
    """Return the device to compute on: the one that was named, or the rank's own.

    Raises:
        InvalidInput: The machine has no such device.
    """
    # Imported here: --help and a refused request do not wait for torch.
    import torch

    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if given is None and len(found) > 1:
        return "cuda" if launch.world == 1 else f"cuda:{launch.local_rank}"
    device = given or "cpu"
    if device not in found and not (device == "cuda" and len(found) > 1):
        text = f"--device {device}: torch finds no such device here; use {' or '.join(found)}"
        raise InvalidInput([Problem("device", "device", text)])
    return device
