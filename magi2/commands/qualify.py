"""`qualify`: the fixed runs of one profile on one checkpoint, measured and recorded.

Promises: the same prompts, image and seed everywhere, so that records of two machines can be compared; runs
that are recorded already are not repeated, so it goes on where it was stopped. Under `torchrun` all ranks run
the same command; rank 0 speaks and writes. A run of one step is a smoke of loading and kernels, no judgement
of quality.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi2.commands.console import Exit, counted, note, say
from magi2.commands.engine_flags import Setup, add_engine_flags, measuring, read_setup
from magi2.commands.layout_flags import profile_row
from magi2.commands.qualify_record import TABLE, Records, Run, choose
from magi2.contract import ACCELERATIONS, DEFAULT_TIER, MAX_STEPS, TIERS, GenerationRequest
from magi2.errors import InvalidInput, LayoutError
from magi2.media.probe import breaches, probe
from magi2.media.target import why_no_folder

if TYPE_CHECKING:
    from magi2.parallel.groups import Groups
    from magi2.pipeline import Magi2Pipeline, Rendered

SEED = 20_260_101
PROMPTS = {
    "t2va": "A lighthouse on a rocky coast at dusk. Waves break over the stones, gulls call, wind hums.",
    "i2va": "The sun sinks slowly towards the sea. Small waves lap at the shore and a bell rings far away.",
}
_IMAGE_SIZE = (896, 512)
_MIB = 2**20


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    text = "Run the fixed workloads of a profile on a checkpoint; write a record and a table row for each."
    parser = subcommands.add_parser("qualify", help="measure a profile on a checkpoint", description=text)
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="a run such as t2va-540p-100, or a pattern such as '*-272p-*'; may be repeated (default: all)",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("qualification"), help="a folder for each profile"
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are wanted, fit the profile and are not recorded yet.

    Raises:
        LayoutError: No profile was named.
        InvalidInput: A run is unknown, or its records and clips cannot be written.
    """
    if not arguments.profile:
        raise LayoutError("--profile is required: name a row of profiles.yaml")
    wanted = _within_caps(choose(arguments.only), profile_row(arguments.profile), arguments.profile)
    setup = read_setup(arguments)
    if why := why_no_folder(arguments.output / arguments.profile):
        raise InvalidInput(f"--output {arguments.output}: {why}")
    # Imported here: what is refused does not wait for torch.
    import torch

    from magi2.parallel.groups import joined  # as above

    with joined(setup.layout, setup.launch, device=torch.device(setup.engine.device)) as groups:
        _qualify(arguments, setup, groups, wanted)
    return Exit.OK


def _within_caps(runs: Sequence[Run], row: dict[str, Any], profile: str) -> list[Run]:
    """Leave out the runs that the profile would refuse of a job, and say so."""
    tier, steps = row.get("max_tier", DEFAULT_TIER), row.get("max_steps", MAX_STEPS)
    fitting = [run for run in runs if TIERS[run.tier].width <= TIERS[tier].width and run.num_steps <= steps]
    for run in runs:
        if run not in fitting:
            note(f"{run.name} is left out: profile {profile} takes at most {tier} and {steps} steps")
    return fitting


def _qualify(arguments: argparse.Namespace, setup: Setup, groups: Groups, wanted: list[Run]) -> None:
    # Imported here: as in `run`.
    import torch

    from magi2.pipeline import Magi2Pipeline  # as above

    folder, records = arguments.output / arguments.profile, None
    if groups.rank == 0:
        records = Records(folder, _identity(arguments.profile, setup))
        for each in filter(records.has, wanted):
            note(f"{each.name} is recorded already")
    # Rank 0 alone sees the folder; all ranks make the same runs.
    own = torch.tensor([records is None or not records.has(each) for each in wanted])
    [missing] = groups.world.share([own], torch.device("cpu"))
    left = [each for each, is_missing in zip(wanted, missing.tolist(), strict=True) if is_missing]
    if left:
        begin = time.monotonic()
        pipeline = Magi2Pipeline(setup.engine, groups=groups)
        load_s = time.monotonic() - begin
        try:
            for each in left:
                figures = _measure(each, setup, pipeline, records)
                if records is not None and figures is not None:
                    say(records.add(each, figures | {"load_s": load_s}))
        finally:
            pipeline.close()
    if groups.rank == 0:
        note(f"{counted(len(left), 'new run')}: {folder / TABLE}")


def _identity(profile: str, setup: Setup) -> dict[str, Any]:
    """Return what all records of a folder have in common."""
    # Imported here: as in `run`.
    from magi2.checkpoint.fingerprint import checkpoint_digest, engine_digest, fingerprint
    from magi2.checkpoint.index import read_model_config

    model = read_model_config(setup.engine.checkpoint).with_dtype(setup.engine.dtype)
    return {
        "profile": profile,
        "layout": str(setup.layout),
        "engine_revision": engine_digest(),
        "checkpoint_revision": checkpoint_digest(setup.engine.checkpoint),
        "fingerprint": fingerprint(setup.engine, model),
    }


def _measure(
    run: Run, setup: Setup, pipeline: Magi2Pipeline, records: Records | None
) -> dict[str, Any] | None:
    """Render one run; return its figures, or None on a rank that has no clip."""
    # Imported here: as in `run`.
    from magi2.media.writer import ClipWriter
    from magi2.wave import render_one  # as above

    image = _first_frame() if run.workload == "i2va" else None
    request = GenerationRequest(
        PROMPTS[run.workload],
        run.tier,
        run.num_steps,
        seed=SEED,
        deterministic=setup.engine.deterministic,
        acceleration=ACCELERATIONS[setup.layout.cache_dit],
        has_image=image is not None,
    )
    writer = None if records is None else ClipWriter(records.clip_path(run), crf=setup.engine.crf)
    begin = time.monotonic()
    with measuring(setup.launch, is_wanted=True) as memory, writer or nullcontext():
        rendered = render_one(pipeline, request, image=image, writer=writer)
        if rendered is None or writer is None:
            return None
        mux_began = time.monotonic()
        writer.finish()
    end = time.monotonic()
    facts = probe(writer.path)
    return {
        "request": request.to_json(),
        "image_sha256": None if image is None else hashlib.sha256(image).hexdigest(),
        "end_to_end_s": end - begin,
        "stage_s": rendered.stats.stage_durations | {"mux": end - mux_began},
        "peak_device_memory_mb": _device_peaks(rendered),
        "peak_host_pss_mb": None if memory is None or memory.peak_bytes is None else memory.peak_bytes / _MIB,
        "is_measured": memory is not None,
        "num_memory_samples": 0 if memory is None else memory.num_samples,
        "frames_sha256": hashlib.sha256(rendered.clip.frames.numpy().data).hexdigest(),
        "samples_sha256": hashlib.sha256(rendered.clip.samples.numpy().data).hexdigest(),
        "acceleration_report": rendered.stats.acceleration,
        "probe": facts.to_json() | {"breaches": breaches(facts, request.width, request.height)},
    }


def _device_peaks(rendered: Rendered) -> list[float] | None:
    stats = rendered.stats
    if stats.peak_memory_mb is None:
        return None
    return stats.rank_peak_memory_mb or [stats.peak_memory_mb]


def _first_frame() -> bytes:
    """Draw the one image of all runs: a sky over a sea, with a sun."""
    # Imported here: it brings Pillow, and a refused command does not need it.
    from PIL import Image, ImageDraw

    sky = Image.linear_gradient("L").resize(_IMAGE_SIZE)
    picture = Image.merge(
        "RGB", (sky, sky.point(lambda value: value // 2 + 40), Image.new("L", _IMAGE_SIZE, 120))
    )
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 340, *_IMAGE_SIZE), fill=(20, 60, 110))
    draw.ellipse((400, 180, 500, 280), fill=(255, 220, 120))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
