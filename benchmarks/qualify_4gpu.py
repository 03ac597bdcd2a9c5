"""Qualify the layouts of four GPUs on four GPUs, with random weights of released sizes.

Stages, each usable alone by `--only` and each in processes of its own with a time-out:
- link: topology, and the rates of the collectives at the engine's own message sizes (link-2: on two GPUs).
- layout-*: a step of every layout at 272p; before it a few layers against one rank, or against resident
  layers of the same cut, in strict deterministic mode.
- speed-sp4, speed-dlo-sp4: three steps at 540p, resident and streamed; peaks against the memory calculator.
- vae, cache: the video decoder over all ranks, equal to one; streamed steps with the cache on.
- loss, group, agent: a rank is killed inside a step: its peers alone, under the farm's group, and under the
  farm's agent with database, broker and store.

Usage: python benchmarks/qualify_4gpu.py --out DIR [--only STAGE ...] [--world 2] [--tiny]
Without `--only` it runs what DIR's `qualify_4gpu.json` has no complete run of, as far as `--budget` seconds
reach, and merges the results into that file; so several calls do all. `--tiny` runs everything at small
sizes, on gloo ranks of the CPU where there is no GPU. Prints a Markdown table. Exit code 1 if a check fails,
a wanted row has no number or a stage did not run; 2 if the call cannot be served.
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tree itself, installed or not

from benchmarks.four_gpus import launch
from benchmarks.four_gpus.rank import NOT_HERE
from benchmarks.four_gpus.record import FILE_NAME, Entry, MixError, Record, Row, Status
from benchmarks.four_gpus.stages import BY_NAME, STAGES, Stage
from worker.devices import free_port

BUDGET_S = 560.0
# What is left of the budget must hold this share of a stage's time-out for it to begin.
LEAST_SHARE = 0.5
_ASK = """
import json, torch
from importlib import metadata
from magi2.checkpoint.fingerprint import engine_digest
count = torch.cuda.device_count()
nccl = torch.cuda.nccl.version() if count else None
print(json.dumps({
    "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": nccl and ".".join(map(str, nccl)),
    "triton": next((d.version for d in metadata.distributions(name="triton")), None),
    "engine": engine_digest()[:16],
}))
"""
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader")


@dataclass(frozen=True)
class Run:
    """One call of this program."""

    out: Path
    world: int
    is_tiny: bool
    host_memory: float | None
    stamp: dict[str, Any]

    @property
    def device_type(self) -> str:
        """Where the ranks compute."""
        return "cuda" if self.stamp["gpus"] else "cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run stages, merge and judge."""
    options = read_options(argv)
    try:
        record = Record.open(options.out, is_tiny=options.tiny)
        run = Run(options.out, options.world, options.tiny, options.host_memory, take_stamp(options.commit))
        refuse(run)
    except (MixError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    run.out.mkdir(parents=True, exist_ok=True)
    wanted = [BY_NAME[name] for name in options.only] if options.only else serving(run.world)
    owed = {stage.name: stage.wanted(on_cpu=run.device_type == "cpu") for stage in wanted}
    todo = [s for s in wanted if options.only or record.complaints({s.name: owed[s.name]})]
    if not options.only:
        todo.sort(key=lambda stage: stage.name in record.entries)  # what never ran comes first
    begin = time.monotonic()
    for stage in todo:
        left = options.budget - (time.monotonic() - begin)
        if left < LEAST_SHARE * stage.limit_s:
            print(f"{stage.name}: not begun, {left:.0f} s of the budget are left: call again", flush=True)
            continue
        record.put(stage.name, run_stage(run, stage, left), run.out)
    print(f"\n{record.table(stage.name for stage in wanted if stage.name in record.entries)}\n")
    if len({record.entries[name].stamp.get("engine") for name in owed if name in record.entries}) > 1:
        print("these rows are of several versions of the engine")
    complaints = record.complaints(owed)
    print("\n".join(complaints or ["every wanted row has its number, and every check holds"]))
    print(f"{time.monotonic() - begin:.0f} s; {run.out / FILE_NAME}", flush=True)
    return 1 if complaints else 0


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON, old and new")
    parser.add_argument("--only", action="append", choices=list(BY_NAME), help="may be repeated")
    parser.add_argument(
        "--world", type=int, choices=(2, 4), default=4, help="2 serves the stage link-2 alone"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all")
    parser.add_argument("--commit", help="for the record, where this copy has no history")
    parser.add_argument("--host-memory", type=float, help="GiB, where the host shows less than it has")
    options = parser.parse_args(argv)
    if unfit := [n for n in options.only or () if options.world not in BY_NAME[n].worlds]:
        parser.error(f"--world {options.world} cannot serve {', '.join(unfit)}")
    return options


def serving(world: int) -> list[Stage]:
    """Return the stages that a number of devices can serve."""
    return [stage for stage in STAGES if world in stage.worlds]


def refuse(run: Run) -> None:
    """Refuse sizes that these devices cannot hold.

    Raises:
        ValueError: It says what to do.
    """
    num_gpus = len(run.stamp["gpus"])
    if num_gpus == 0 and not run.is_tiny:
        raise ValueError("no GPU here: released sizes need --world of them; --tiny runs on the CPU")
    if 0 < num_gpus < run.world:
        raise ValueError(f"{num_gpus} GPUs here, {run.world} are needed: --world 2 serves the stage link-2")


def take_stamp(commit: str | None) -> dict[str, Any]:
    """Return what tells this run from others: command, commit, machine and versions."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        cwd=launch.ROOT,
        env=launch.environment(on_cpu=False),
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "command": shlex.join(["python", "benchmarks/qualify_4gpu.py", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        # Marked where files differ from it; a copy without its history has none but the given one.
        "commit": commit or _said("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
        "driver": _said(*_DRIVER),
        "host": platform.machine(),
        "python": platform.python_version(),
        **json.loads(asked.stdout),
    }


def _said(*words: str) -> str:
    """Return the first line that a program prints; `unknown` where it is not here or fails."""
    try:
        done = subprocess.run(words, cwd=launch.ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]


def run_stage(run: Run, stage: Stage, left_s: float) -> Entry:
    """Run one stage in processes of its own and return what came of it."""
    limit_s = min(stage.limit(is_tiny=run.is_tiny), left_s)
    layout = "" if stage.layout is None else f", {stage.layout}"
    print(f"{stage.name}{layout}: at most {limit_s:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="q4-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL does not run as root
        rows, port = folder / "rows.jsonl", free_port()
        common = [
            *("-m", "benchmarks.four_gpus.rank", "--stage", stage.name, "--part", stage.part),
            *("--world", str(run.world), "--device", run.device_type, "--port", str(port)),
            *("--rows", str(rows), "--limit", str(limit_s)),
            *(["--tiny"] if run.is_tiny else []),
            *(["--host-memory", str(run.host_memory)] if run.host_memory else []),
        ]
        commands = [[*common, "--rank", str(rank)] for rank in range(1 if stage.is_single else run.world)]
        environ = launch.environment(on_cpu=run.device_type == "cpu", scratch=folder)
        started = launch.start(commands, environ, folder)
        end = launch.wait(started, limit_s)
        found, lacks = read_rows(rows)
        evidence = started.tails() if end.why else {}
    stamp = run.stamp | {"world": run.world, "layout": str(stage.layout or "")}
    status, why = Status.DONE, ""
    if NOT_HERE in end.codes:
        status, why, evidence = Status.NOT_RUN, lacks, {}
    elif end.why:
        status, why = Status.FAILED, end.why
    print(f"{stage.name}: {status}{': ' if why else ''}{why} ({end.seconds:.1f} s)", flush=True)
    for lines in list(evidence.values())[:1]:  # the record has all of them
        print(*lines, sep="\n", flush=True)
    return Entry(status, why, round(end.seconds, 1), stamp, tuple(found), evidence)


def read_rows(path: Path) -> tuple[list[Row], str]:
    """Return the rows that a stage wrote, and what it said that this machine lacks."""
    rows, lacks = [], ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        data = json.loads(line)
        if "not_run" in data:
            lacks = data["not_run"]
        else:
            rows.append(Row(**data))
    return rows, lacks


if __name__ == "__main__":
    sys.exit(main())
