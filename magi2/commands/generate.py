"""`generate`: one request in, one mp4 out.

Promises: every broken rule of the contract is one line and exit code 2, before anything is loaded; a
checkpoint that does not fit is reported whole; the file appears complete or not at all. The image is read
here: the engine itself opens no path of a request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magi2.commands.checkpoint_folder import checkpoint_folder
from magi2.commands.console import Exit, counted, note, phase_bars, say
from magi2.config import DTYPES, EngineConfig, engine_environment
from magi2.contract import GenerationRequest, ImageFacts, Problem, default_limits, validate
from magi2.errors import InvalidInput

if TYPE_CHECKING:
    from magi2.pipeline import Rendered

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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Render what the arguments ask for."""
    job = _read(arguments)
    if job.is_seed_drawn:
        note(f"seed {job.request.seed} was drawn; give --seed {job.request.seed} to make this clip again")
    _render(job)
    return Exit.OK


@dataclass(frozen=True)
class _Job:
    request: GenerationRequest
    image: bytes | None
    output: Path
    engine: EngineConfig
    is_seed_drawn: bool


def _read(arguments: argparse.Namespace) -> _Job:
    """Check everything that can be checked without the checkpoint.

    Raises:
        InvalidInput: Every broken rule.
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
    engine = EngineConfig(
        checkpoint=checkpoint_folder(arguments.checkpoint),
        device=arguments.device or _default_device(),
        dtype=arguments.dtype,
        deterministic=deterministic,
    )
    image = images[0] if images else None
    return _Job(outcome.request, image, arguments.output, engine, is_seed_drawn=arguments.seed is None)


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


def _default_device() -> str:
    # Imported here: --help and a refused request do not wait for torch.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _render(job: _Job) -> None:
    # Imported here: a refused request does not wait for torch.
    from magi2.media.mp4 import write_mp4
    from magi2.pipeline import Magi2Pipeline

    with phase_bars() as bars:
        begin = time.monotonic()
        pipeline = Magi2Pipeline(job.engine, progress=bars)
        durations = {"load": time.monotonic() - begin}
        try:
            rendered = pipeline(job.request, image=job.image, progress=bars)
        finally:
            pipeline.close()
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
