"""`generate`: one request in, one mp4 out.

Promises: every broken rule of the contract is one line and exit code 2, before anything is loaded; a
checkpoint that does not fit is reported whole; the file appears complete or not at all. The image is read
here: the engine itself opens no path of a request. Under `torchrun` all ranks run the same command; rank 0
speaks and writes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magi2.commands.console import Exit, counted, note, phase_bars, say
from magi2.commands.engine_flags import Setup, add_engine_flags, is_deterministic, measuring, read_setup
from magi2.contract import ACCELERATIONS, GenerationRequest, ImageFacts, Problem, default_limits, validate
from magi2.errors import InvalidInput
from magi2.media.target import why_no_file

if TYPE_CHECKING:
    from magi2.host_memory import PeakPss
    from magi2.media.writer import ClipWriter
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
}


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subcommands.add_parser("generate", help="render one clip", description="Render one clip.")
    for name, text in _FIELDS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=text)
    text = "not supported: the model's own is always used"
    parser.add_argument("--negative-prompt", metavar="VALUE", help=text)
    parser.add_argument("--image", metavar="FILE", type=Path, action="append", default=[], help="first frame")
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("magi2.mp4"), help="the mp4")
    parser.add_argument("--measure", action="store_true", help="sample the host memory of all processes")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Render what the arguments ask for."""
    written: list[Path] = []
    try:
        _run(arguments, written)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{written[0]} is complete" if written else "no file was written")
        raise
    return Exit.OK


def _run(arguments: argparse.Namespace, written: list[Path]) -> None:
    job = _read(arguments)
    # Imported here: a refused request does not wait for torch.
    import torch

    # Imported here: it brings torch too.
    from magi2.parallel.groups import joined

    setup = job.setup
    with joined(setup.layout, setup.launch, device=torch.device(setup.engine.device)) as groups:
        _render(_with_one_seed(job, groups), groups, written)


@dataclass(frozen=True)
class _Job:
    request: GenerationRequest
    image: bytes | None
    output: Path
    setup: Setup
    is_seed_drawn: bool
    is_measured: bool


def _read(arguments: argparse.Namespace) -> _Job:
    """Check everything that can be checked without the weights.

    Raises:
        InvalidInput: Every broken rule.
        LayoutError: The layout cannot work, or not with the ranks that were launched.
    """
    given = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in _FIELDS}
    images, facts, problems = _read_images(arguments.image)
    outcome = validate(given, limits=default_limits(deterministic=is_deterministic(arguments)), images=facts)
    problems += outcome.problems
    if arguments.negative_prompt is not None:
        text = "--negative-prompt cannot be given: the negative prompt is the model's own; leave the flag out"
        problems.append(Problem("negative_prompt", "field_unsupported", text))
    if why := why_no_file(arguments.output):
        problems.append(Problem("output", "output", f"--output {arguments.output}: {why}"))
    if problems or outcome.request is None:
        raise InvalidInput(problems)
    setup = read_setup(arguments)
    return _Job(
        replace(outcome.request, acceleration=ACCELERATIONS[setup.layout.cache_dit]),
        images[0] if images else None,
        arguments.output,
        setup,
        is_seed_drawn=arguments.seed is None,
        is_measured=arguments.measure,
    )


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


def _with_one_seed(job: _Job, groups: Groups) -> _Job:
    """Let all ranks take the seed that the first one drew."""
    if not job.is_seed_drawn:
        return job
    # Imported here: as in `run`.
    import torch

    [seed] = groups.world.share([torch.tensor(job.request.seed)], torch.device("cpu"))
    if groups.rank == 0:
        note(f"seed {int(seed)} was drawn; give --seed {int(seed)} to make this clip again")
    return replace(job, request=replace(job.request, seed=int(seed)))


def _render(job: _Job, groups: Groups, written: list[Path]) -> None:
    """Render the job; `written` then has the file, if there is one, however this ends."""
    # Imported here: a refused request does not wait for torch.
    from magi2.media.writer import ClipWriter
    from magi2.pipeline import Magi2Pipeline
    from magi2.record import silent
    from magi2.wave import render_one

    engine = job.setup.engine
    with (
        phase_bars() if groups.rank == 0 else nullcontext(silent) as shown,
        measuring(job.setup.launch, is_wanted=job.is_measured) as memory,
        _listed(ClipWriter(job.output, crf=engine.crf), written) as writer,
    ):
        bars: ProgressFn = shown
        begin = time.monotonic()
        pipeline = Magi2Pipeline(engine, progress=bars, groups=groups)
        durations = {"load": time.monotonic() - begin}
        try:
            rendered = render_one(pipeline, job.request, image=job.image, progress=bars, writer=writer)
        finally:
            pipeline.close()
        if rendered is None:
            return
        begin = time.monotonic()
        bars("mux", 0, 1)
        writer.finish()
        bars("mux", 1, 1)
        durations |= rendered.stats.stage_durations | {"mux": time.monotonic() - begin}
    _report(job, rendered, durations)
    if memory is not None:
        _report_memory(rendered, memory)


@contextmanager
def _listed(writer: ClipWriter, written: list[Path]) -> Iterator[ClipWriter]:
    """Lend a writer, close it, and list the file that it has written."""
    try:
        with writer:
            yield writer
    finally:
        if writer.is_written:
            written.append(writer.path)


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


def _report_memory(rendered: Rendered, memory: PeakPss) -> None:
    host = "unknown" if memory.peak_bytes is None else f"{memory.peak_bytes / 2**20:.0f} MiB"
    say(f"peak host memory of all processes {host} ({counted(memory.num_samples, 'sample')})")
    if each := rendered.stats.rank_peak_memory_mb:
        say(f"peak device memory of each rank {', '.join(f'{peak:.0f}' for peak in each)} MiB")
