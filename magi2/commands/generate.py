"""`generate`: one request in, one mp4 out.

Promises: every broken rule of the contract is one line and exit code 2, before anything is loaded; a
checkpoint that does not fit is reported whole; the file appears complete or not at all. The image is read
here: the engine itself opens no path of a request. Under `torchrun` all ranks run the same command; rank 0
speaks and writes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magi2.commands.checkpoint_folder import checkpoint_folder
from magi2.commands.console import Exit, counted, note, phase_bars, say
from magi2.commands.layout_flags import add_layout_flags, cache_of, layout_of
from magi2.config import DTYPES, EngineConfig, Launch, engine_environment, read_launch
from magi2.contract import ACCELERATIONS, GenerationRequest, ImageFacts, Problem, default_limits, validate
from magi2.errors import InvalidInput, LayoutError
from magi2.parallel.layout import Layout, check, refuse_absent

if TYPE_CHECKING:
    from magi2.parallel.groups import Groups
    from magi2.pipeline import Rendered
    from magi2.record import ProgressFn

# Flags that are fields of the request, passed on as they were typed: the contract reads the numbers.
_FIELDS = {
    "prompt": "what the clip shows and sounds like: plain text, or a structured caption as JSON",
    "resolution": "272p or 540p",
    "size": "448x256 or 896x512, instead of the resolution",
    "seconds": "10",
    "num-frames": "125",
    "fps": "12.5",
    "num-inference-steps": "1 to 200 (default 100)",
    "seed": "0 to 2^63-1; drawn and printed if not given",
    "output-width": "resize the result, together with --output-height",
    "output-height": "even, 64 to 4096",
    "negative-prompt": "not supported: the model's own is always used",
}


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subcommands.add_parser("generate", help="render one clip", description="Render one clip.")
    for name, text in _FIELDS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=text)
    parser.add_argument("--image", metavar="FILE", type=Path, action="append", default=[], help="first frame")
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("magi2.mp4"), help="the mp4")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="default: MAGI2_CKPT_ROOT")
    parser.add_argument("--device", help="as torch spells it (default: cuda if there is one, else cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the large matrices")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="refuse operations without a form that repeats bit for bit (also MAGI2_DETERMINISTIC=1)",
    )
    add_layout_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Render what the arguments ask for."""
    job = _read(arguments)
    # Imported here: a refused request does not wait for torch.
    import torch

    # Imported here: it brings torch too.
    from magi2.parallel.groups import joined

    with joined(job.layout, job.launch, device=torch.device(job.engine.device)) as groups:
        _render(_with_one_seed(job, groups), groups)
    return Exit.OK


@dataclass(frozen=True)
class _Job:
    request: GenerationRequest
    image: bytes | None
    output: Path
    engine: EngineConfig
    layout: Layout
    launch: Launch
    is_seed_drawn: bool


def _read(arguments: argparse.Namespace) -> _Job:
    """Check everything that can be checked without the weights.

    Raises:
        InvalidInput: Every broken rule.
        LayoutError: The layout cannot work, or not with the ranks that were launched.
    """
    given = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in _FIELDS}
    deterministic = arguments.deterministic or bool(engine_environment().deterministic)
    images, facts, problems = _read_images(arguments.image)
    outcome = validate(given, limits=default_limits(deterministic=deterministic), images=facts)
    problems += outcome.problems
    if not arguments.output.absolute().parent.is_dir():
        text = f"--output {arguments.output}: the folder does not exist; create it, or name another"
        problems.append(Problem("output", "output", text))
    if problems or outcome.request is None:
        raise InvalidInput(problems)
    root, launch = checkpoint_folder(arguments.checkpoint), _launch()
    layout = _layout(arguments, root, launch)
    engine = EngineConfig(
        checkpoint=root,
        device=_device(arguments.device, launch),
        dtype=arguments.dtype,
        deterministic=deterministic,
        cache=cache_of(arguments),
    )
    return _Job(
        replace(outcome.request, acceleration=ACCELERATIONS[layout.cache_dit]),
        images[0] if images else None,
        arguments.output,
        engine,
        layout,
        launch,
        is_seed_drawn=arguments.seed is None,
    )


def _launch() -> Launch:
    try:
        return read_launch()
    except ValueError as error:
        raise LayoutError(str(error)) from error


def _layout(arguments: argparse.Namespace, root: Path, launch: Launch) -> Layout:
    """Check the layout against this release, the model's sizes and the launched ranks."""
    layout = layout_of(arguments)
    refuse_absent(layout)
    # Imported here: a broken rule does not wait for the reader of checkpoints.
    from magi2.checkpoint.index import read_model_config
    from magi2.sampling.cache import missing_package  # as above

    if layout.cache_dit and (why := missing_package()):
        raise LayoutError(f"--cache-dit: {why}")
    check(layout, read_model_config(root), launched=launch.world)
    if layout.warning and launch.rank == 0:
        note(f"magi2: {layout.warning}")
    return layout


def _read_images(paths: list[Path]) -> tuple[list[bytes], list[ImageFacts], list[Problem]]:
    images: list[bytes] = []
    facts: list[ImageFacts] = []
    problems: list[Problem] = []
    if not paths:
        return images, facts, problems
    # Imported here: it brings torch, and a request without an image is refused sooner without it.
    from magi2.media.image import open_image

    for path in paths:
        try:
            images.append(path.read_bytes())
            picture = open_image(images[-1])
            facts.append(ImageFacts(picture.width, picture.height))
        except OSError as error:
            text = f"--image {path} cannot be read: {error.strerror or error}"
            problems.append(Problem("image", "image_undecodable", text))
        except InvalidInput as error:
            problems += error.problems
    return images, facts, problems


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


def _with_one_seed(job: _Job, groups: Groups) -> _Job:
    """Let all ranks take the seed that the output rank drew."""
    if not job.is_seed_drawn:
        return job
    # Imported here: as in `run`.
    import torch

    [seed] = groups.replica.share([torch.tensor(job.request.seed)], torch.device("cpu"))
    if groups.is_output:
        note(f"seed {int(seed)} was drawn; give --seed {int(seed)} to make this clip again")
    return replace(job, request=replace(job.request, seed=int(seed)))


def _render(job: _Job, groups: Groups) -> None:
    # Imported here: a refused request does not wait for torch.
    from magi2.media.mp4 import write_mp4
    from magi2.pipeline import Magi2Pipeline
    from magi2.record import silent

    with phase_bars() if groups.is_output else nullcontext(silent) as shown:
        bars: ProgressFn = shown
        begin = time.monotonic()
        pipeline = Magi2Pipeline(job.engine, progress=bars, groups=groups)
        durations = {"load": time.monotonic() - begin}
        try:
            rendered = pipeline(job.request, image=job.image, progress=bars)
        finally:
            pipeline.close()
        if rendered is None:
            return
        begin = time.monotonic()
        bars("mux", 0, 1)
        write_mp4(job.output, rendered.clip, crf=job.engine.crf)
        bars("mux", 1, 1)
        durations |= rendered.stats.stage_durations | {"mux": time.monotonic() - begin}
    _report(job, rendered, durations)


def _report(job: _Job, rendered: Rendered, durations: Mapping[str, float]) -> None:
    clip, peak = rendered.clip, rendered.stats.peak_memory_mb
    say(f"{job.output}: {clip.width}x{clip.height}, 125 frames at 12.5 fps, 10 s of stereo sound, checked")
    steps = counted(job.request.num_inference_steps, "step")
    say(f"seed {job.request.seed}, {steps} at {job.request.tier}")
    say(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in durations.items()))
    if peak is not None:
        say(f"peak device memory {peak:.0f} MiB")
    if accelerated := rendered.stats.acceleration:
        say(f"{len(accelerated['cached_steps'])} of {steps} from the cache")
