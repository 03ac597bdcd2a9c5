"""A rank is killed inside a step under the farm's group: it ends in time, comes back, and the job is done.

The ranks run the real engine on the tiny checkpoint, over the real devices; no database is needed.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.four_gpus import launch
from benchmarks.four_gpus.rank import Place, needing
from benchmarks.four_gpus.record import Row
from magi2.contract import GenerationRequest
from worker.board import WorkReport
from worker.engine_api import Outcome, RenderRequest, RenderResult
from worker.group import CRASH_NEWS_S, GpuGroup, GroupCrashError, GroupSpec, GroupTimes, Stop

# So many steps that the kill meets one of them.
MANY_STEPS, KILL_AFTER = 200, 3
FEW_STEPS = 4
# On a CPU a step takes many seconds.
KILL_AFTER_ON_CPU = FEW_STEPS_ON_CPU = 1
PROMPT = "A red kite climbs over dunes."
TIMES = GroupTimes()


def run_group(place: Place) -> None:
    """Load, kill, load again, render."""
    with needing("av", "PIL", "safetensors", "transformers", "diffusers"):
        # Imported here: it brings torch, which this process needs for nothing else.
        from magi2.checkpoint.tiny import write_tiny_checkpoint
    with tempfile.TemporaryDirectory(prefix="group-") as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "tiny")
        group = GpuGroup(spec_of(place, folder), TIMES)
        try:
            lose_a_rank(place, group, folder)
        finally:
            group.kill()


def spec_of(place: Place, folder: Path) -> GroupSpec:
    """Return the group of all ranks."""
    is_cpu = place.device_type == "cpu"
    return GroupSpec(
        profile="qualify",
        engine="magi2",
        devices=() if is_cpu else tuple(range(place.world)),
        world=place.world,
        ckpt_root=str(folder / "tiny"),
        deterministic=False,
        environment=launch.environment(on_cpu=is_cpu),
        log_dir=folder / "logs",
        layout={"ulysses": place.world, "vae_patch_parallel": place.world},
    )


def lose_a_rank(place: Place, group: GpuGroup, folder: Path) -> None:
    """Kill the last rank after a step of a long job, and measure what follows."""
    # Imported here: it needs a package that a machine may lack, which `run_group` says.
    from magi2.media.probe import breaches, probe

    rows = place.rows
    group.start()
    pids = group.pids
    rows.say(f"ranks {pids} are ready")
    killed_at: list[float] = []
    is_cpu = place.device_type == "cpu"
    kill_after, few_steps = (KILL_AFTER_ON_CPU, FEW_STEPS_ON_CPU) if is_cpu else (KILL_AFTER, FEW_STEPS)

    def watch(report: WorkReport) -> None:
        if not killed_at and report.phase == "denoise" and report.step >= kill_after:
            killed_at.append(time.monotonic())
            os.kill(pids[-1], signal.SIGKILL)

    crash: GroupCrashError | None = None
    try:
        render(group, folder / "lost.mp4", MANY_STEPS, watch)
    except GroupCrashError as error:
        crash = error
    ended_at = time.monotonic()
    seconds = ended_at - killed_at[0] if killed_at and crash else None
    most = CRASH_NEWS_S + TIMES.term_s + TIMES.kill_s
    is_met = seconds is not None and seconds <= most and not any(map(is_alive, pids))
    facts = {"said": str(crash)[:300]}
    name = "from the kill to the end of the group"
    rows.add(Row(name, seconds, "s", f"<= {most:g} s, nothing left", is_met, facts))
    group.start()
    again = time.monotonic() - ended_at
    is_fresh = set(group.pids).isdisjoint(pids) and group.answers()
    rows.add(Row("from the end to ready again", again, "s", "new ranks that answer", is_fresh))
    begin = time.monotonic()
    outcome = render(group, folder / "clip.mp4", few_steps, lambda _report: None)
    problems = (
        breaches(probe(folder / "clip.mp4"), 448, 256)
        if isinstance(outcome, RenderResult)
        else [str(outcome)]
    )
    facts = {"problems": problems, "steps": few_steps}
    name = "the job on the new ranks"
    rows.add(Row(name, time.monotonic() - begin, "s", "a valid clip", not problems, facts))


def render(group: GpuGroup, path: Path, num_steps: int, watch: Callable[[WorkReport], None]) -> Outcome:
    """Run one job of the group."""
    request = GenerationRequest(PROMPT, "272p", num_steps, seed=5)
    token = path.stem
    wanted = RenderRequest(token, request.to_json(), None, str(path))
    return group.run([wanted], token, on_progress=watch, stop=lambda: Stop.GO_ON)[token]


def is_alive(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
