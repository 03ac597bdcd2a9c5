"""`magi2-farm submit`: one job through the public API, with `--wait` until its end."""

import argparse
from pathlib import Path
from typing import Any

from farm.commands import connection
from farm.commands.client import FarmClient, Video
from farm.commands.console import note, result, result_json
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.commands.progress import ProgressLines

_FIELDS = (
    *("size", "resolution", "seed", "output_width", "output_height", "profile", "priority", "acceleration"),
    "webhook",
)


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("submit", help="submit one job")
    parser.add_argument("prompt", help="text, or a structured prompt as JSON")
    parser.add_argument("--image", type=Path, help="one still image that the clip starts from")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the profile's)")
    parser.add_argument("--size", help="448x256 or 896x512")
    parser.add_argument("--resolution", help="272p or 540p")
    parser.add_argument("--seed", type=int, help="default: drawn by the server and shown")
    parser.add_argument("--output-width", type=int, help="final width; with --output-height")
    parser.add_argument("--output-height", type=int, help="final height; with --output-width")
    parser.add_argument("--profile", help="how to run it (default: auto)")
    parser.add_argument("--priority", help="low, normal or high")
    parser.add_argument("--acceleration", help="off or cache_dit, where the profile allows it")
    parser.add_argument("--webhook", help="URL that gets one signed POST at the end")
    parser.add_argument("--wait", action="store_true", help="show progress until the job is finished")
    parser.add_argument("--timeout", type=float, help="with --wait: give up after this many seconds")
    parser.add_argument("-o", "--output", type=Path, help="write the finished clip here (implies --wait)")
    parser.add_argument("--json", action="store_true", help="print the video object")
    connection.add_to(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Submit, and follow the job if asked."""
    if arguments.image is not None and not arguments.image.is_file():
        raise CommandError(f"--image {arguments.image} is not a file", Exit.USAGE)
    with FarmClient(connection.access_of(arguments)) as client:
        video = client.submit(fields_of(arguments), arguments.image)
        for notice in video.get("notices") or []:
            note(notice)
        last, lines = [video], ProgressLines(note)

        def show(read: Video) -> None:
            last[:] = [read]
            lines.show(read)

        try:
            if arguments.wait or arguments.output:
                note(f"{video['id']}, seed {video['seed']}")
                video = client.wait(video["id"], timeout_s=arguments.timeout, show=show)
            if arguments.output and video["status"] == "completed":
                client.download(video["id"], arguments.output)
                note(f"wrote {arguments.output}")
        except CommandError:
            _print(last[0], as_json=arguments.json)  # the job is there: a script must not lose its id
            raise
    return _report(video, as_json=arguments.json)


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request's members that were given."""
    fields = {"prompt": arguments.prompt, "num_inference_steps": arguments.steps}
    fields |= {name: getattr(arguments, name) for name in _FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _print(video: Video, *, as_json: bool) -> None:
    if as_json:
        result_json(video)
    else:
        result(video["id"])


def _report(video: Video, *, as_json: bool) -> int:
    _print(video, as_json=as_json)
    if video["status"] != "failed":
        return Exit.OK
    error = video.get("error") or {}
    note(f"{video['id']} {video['state']}: {error.get('code')}: {error.get('message')}")
    return Exit.FAILED
