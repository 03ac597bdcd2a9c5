"""`plan`: what a layout needs of every device and of the host, before anything is started.

Without a layout it compares the usual ones. A layout that cannot work, or needs more than the machine that
was named has, is refused as the engine would refuse it. Torch-free: it reads sizes, never weights.
"""

from __future__ import annotations

import argparse

from magi2.commands.console import Exit, note, say
from magi2.commands.layout_flags import add_layout_flags, layout_of
from magi2.config import ModelConfig
from magi2.contract import DEFAULT_TIER, TIERS
from magi2.parallel.layout import Layout, check
from magi2.parallel.memory import BY_LAYER, GIB, MemoryPlan, check_memory, place, plan, released_plan

USUAL = (
    Layout(),
    Layout(ulysses=4),
    Layout(tp=4),
    Layout(tp=2, ulysses=2),
    Layout(cfg_parallel=2, ulysses=2),
    Layout(ulysses=8),
    Layout(ulysses=8, ep=4),
    Layout(ulysses=4, hsdp=True),
    Layout(ulysses=2, cfg_parallel=2, hsdp=True),
    Layout(data_parallel=4, dlo=True),
    Layout(data_parallel=2, ulysses=2, dlo=True),
    Layout(ulysses=4, dlo=True, dlo_no_allgather=True),
    Layout(layerwise=True),
)


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    text = "Print the memory that a layout of the released model needs; without one, compare the usual."
    parser = subcommands.add_parser("plan", help="memory that a layout needs", description=text)
    parser.add_argument(
        "--resolution", choices=tuple(TIERS), default=DEFAULT_TIER, help="of the largest clip"
    )
    parser.add_argument("--device-memory", metavar="GIB", type=float, help="refuse what a device cannot hold")
    parser.add_argument("--host-memory", metavar="GIB", type=float, help="refuse what the host cannot pin")
    add_layout_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        LayoutError: The layout breaks a rule, or does not fit.
    """
    layout, model = layout_of(arguments), ModelConfig.released()
    if layout == Layout() and not arguments.profile:
        _compare(model, arguments.resolution)
        return Exit.OK
    check(layout, model)
    device_bytes = None if arguments.device_memory is None else int(arguments.device_memory * GIB)
    needed = released_plan(layout, tier=arguments.resolution, device_bytes=device_bytes)
    say(f"layout {layout}: {layout.world} {'rank' if layout.world == 1 else 'ranks'}, {arguments.resolution}")
    for name, value in needed.table():
        say(f"  {name:<34} {value:8.2f} GiB")
    if layout.is_streamed and device_bytes is not None:
        chosen = place(model, layout, tier=arguments.resolution, device_bytes=device_bytes)
        unit = "layer" if chosen.stream_by == BY_LAYER else "MoE head"
        say(f"  streamed by {unit}; {chosen.num_resident} of {model.num_layers} layers stay on the device")
    if layout.warning:
        note(f"magi2: {layout.warning}")
    check_memory(
        needed,
        layout,
        device_bytes=needed.device if device_bytes is None else device_bytes,
        host_bytes=_limit(arguments.host_memory, needed.pinned_node),
    )
    return Exit.OK


def _compare(model: ModelConfig, tier: str) -> None:
    say(f"GiB at {tier}; device = weights + buffers + the larger of activations and text encoder")
    say(f"{'layout':<36} {'ranks':>5} {'weights':>8} {'buffers':>8} {'activ.':>7} {'device':>7} {'host':>7}")
    for layout in USUAL:
        say(_row(layout, plan(model, layout, tier=tier)))


def _row(layout: Layout, needed: MemoryPlan) -> str:
    figures = (needed.weights, needed.buffers, needed.activations, needed.device, needed.pinned_node)
    sizes = " ".join(
        f"{value / GIB:{width}.2f}" for value, width in zip(figures, (8, 8, 7, 7, 7), strict=True)
    )
    return f"{layout!s:<36} {layout.world:>5} {sizes}"


def _limit(given_gib: float | None, needed: int) -> int:
    return needed if given_gib is None else int(given_gib * GIB)
