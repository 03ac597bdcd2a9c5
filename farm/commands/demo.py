"""`magi2-farm demo`: from nothing to a verified mp4 through the whole farm, then stop.

It starts the embedded farm, submits one job over HTTP, shows each step, downloads the clip by the content
endpoint and verifies it against the output contract. It does nothing that a client could not do.
"""

import argparse
import time
from pathlib import Path

from farm.commands import connection
from farm.commands.client import FarmClient, Video
from farm.commands.console import note, result
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.commands.progress import ProgressLines
from farm.commands.stopping import StopRequested, stop_signals
from farm.commands.up import curl_line
from farm.embedded.state import Access, StateDirectory
from farm.embedded.supervisor import PROFILE, Supervisor
from farm.settings import environment
from magi2.contract import TIERS
from magi2.media.probe import breaches, probe

PROMPT = "A paper boat crosses a puddle in the rain; drops drum on the water."
TIER = TIERS["272p"]
STEPS = 4
SEED = 7
JOB_TIMEOUT_S = 600.0


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("demo", help="start the farm, render one clip, write the mp4, stop")
    parser.add_argument("-o", "--output", type=Path, default=Path("demo.mp4"), help="where the clip goes")
    parser.add_argument("--prompt", default=PROMPT, help="what to render")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"denoising steps (default {STEPS})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start, render, verify, stop."""
    started_at = time.monotonic()
    state = StateDirectory(connection.state_path())
    supervisor = Supervisor(state, environment(), say=note)
    try:
        with stop_signals():
            try:
                note("Starting PostgreSQL, Valkey, SeaweedFS, api, ticker and one worker on loopback")
                access = supervisor.start().access
                note(f"The farm is ready at {access.url} after {time.monotonic() - started_at:.1f} s")
                _render(supervisor, access, arguments)
            finally:
                supervisor.stop()
    except StopRequested:
        note("Stopped before the clip was finished")
        return Exit.INTERRUPTED
    _say_how_to_go_on(arguments.output, access, state, time.monotonic() - started_at)
    return Exit.OK


def _render(supervisor: Supervisor, access: Access, arguments: argparse.Namespace) -> None:
    request = {
        "prompt": arguments.prompt,
        "size": f"{TIER.width}x{TIER.height}",
        "num_inference_steps": arguments.steps,
        "seed": SEED,
        "profile": PROFILE,
    }
    with FarmClient(access) as client:
        job_id = client.submit(request)["id"]
        note(f"POST /v1/videos -> {job_id}: {TIER.width}x{TIER.height}, {arguments.steps} steps, seed {SEED}")
        show, keep_running = ProgressLines(note).show, supervisor.keep_running
        _refuse_failure(client.wait(job_id, timeout_s=JOB_TIMEOUT_S, show=show, meanwhile=keep_running))
        client.download(job_id, arguments.output)
    _verify(arguments.output)


def _refuse_failure(video: Video) -> None:
    if video["status"] != "completed":
        error = video.get("error") or {}
        raise CommandError(f"{video['id']} {video['state']}: {error.get('code')}: {error.get('message')}")


def _verify(clip: Path) -> None:
    facts = probe(clip)
    problems = breaches(facts, TIER.width, TIER.height)
    if problems:
        raise CommandError(f"{clip} breaks the output contract: {'; '.join(problems)}")
    note("Verified: 125 frames, 448x256, 12.5 fps, H.264; stereo 44.1 kHz AAC")


def _say_how_to_go_on(clip: Path, access: Access, state: StateDirectory, took_s: float) -> None:
    result(f"{clip.resolve()}   ({clip.stat().st_size / 1e6:.1f} MB, {took_s:.0f} s from start to mp4)")
    result("The weights are random, so the clip is noise in the right shape. To go on:")
    result("  ./magi2-farm up      # keeps the farm running; then, in another terminal:")
    result("  " + curl_line(access, state))
