"""The qualification on four GPUs: merging, verdict, table, choice of stages, end of what hangs."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import qualify_4gpu
from benchmarks.four_gpus import launch, rank
from benchmarks.four_gpus.record import FILE_NAME, Entry, MixError, Record, Row, Status
from benchmarks.four_gpus.stages import BY_NAME, PEAK, STAGES, STEP
from magi2.config import ModelConfig
from magi2.parallel.layout import Layout, check

DONE = Entry(Status.DONE, rows=(Row("a", 1.5, "s"),))
CPU = {"command": "here", "gpus": []}


# ---- the record


def test_stage_that_runs_again_replaces_its_own_entry_and_no_other(tmp_path: Path) -> None:
    first = Record.open(tmp_path, is_tiny=True)
    first.put("link", DONE, tmp_path)
    first.put("vae", Entry(Status.FAILED, "process 0 ended with 1", rows=DONE.rows), tmp_path)
    second = Record.open(tmp_path, is_tiny=True)
    second.put("vae", Entry(Status.DONE, rows=(Row("b", 2.0),), stamp={"commit": "abc"}), tmp_path)
    found = Record.open(tmp_path, is_tiny=True).entries
    assert found["link"] == DONE
    assert found["vae"].rows == (Row("b", 2.0),)
    assert found["vae"].stamp == {"commit": "abc"}
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_small_and_released_sizes_are_never_merged(tmp_path: Path) -> None:
    Record(is_tiny=True).put("link", DONE, tmp_path)
    with pytest.raises(MixError, match="give --out another folder"):
        Record.open(tmp_path, is_tiny=False)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (None, "link: not run"),
        (Entry(Status.NOT_RUN, "no servers", rows=DONE.rows), "link: not run: no servers"),
        (
            Entry(Status.FAILED, "not finished within 9 s", rows=DONE.rows),
            "link: failed: not finished within 9 s",
        ),
        (Entry(Status.DONE, rows=(Row("b", 1.0),)), "link: no number for 'a'"),
        (Entry(Status.DONE, rows=(Row("a", None),)), "link: no number for 'a'"),
        (Entry(Status.DONE, rows=(Row("a", float("nan")),)), "link: no number for 'a'"),
        (Entry(Status.DONE, rows=(Row("a", 3.0, target="<= 2", ok=False),)), "link: missed: a"),
    ],
)
def test_whatever_is_missing_or_missed_is_complained_of(entry: Entry | None, complaint: str) -> None:
    record = Record(is_tiny=True, entries={} if entry is None else {"link": entry})
    assert record.complaints({"link": ("a",)}) == [complaint]


def test_complete_stage_is_not_complained_of() -> None:
    assert Record(is_tiny=True, entries={"link": DONE}).complaints({"link": ("a",)}) == []


def test_table_shows_numbers_targets_and_stages_that_did_not_run() -> None:
    rows = (
        Row("step", 2.123456, "s", "<= 2.2 s"),
        Row("rate", 310.0, "GB/s"),
        Row("bits", 3, "", "0", ok=False),
    )
    record = Record(
        is_tiny=False,
        entries={"speed-sp4": Entry(Status.DONE, rows=rows), "agent": Entry(Status.NOT_RUN, "no")},
    )
    assert record.table(["speed-sp4", "agent"]).splitlines() == [
        "| stage | what | target | value | |",
        "|---|---|---|---|---|",
        "| speed-sp4 | step | <= 2.2 s | 2.123 s | met |",
        "| speed-sp4 | rate | - | 310 GB/s |  |",
        "| speed-sp4 | bits | 0 | 3 | missed |",
        "| agent | - | - | - | not run |",
    ]


# ---- the call


class Stages:
    """Takes the place of real stages: remembers which ran, and gives each what it owes."""

    def __init__(self, *, failing: tuple[str, ...] = ()) -> None:
        self.ran: list[str] = []
        self._failing = failing

    def __call__(self, _run: qualify_4gpu.Run, stage: qualify_4gpu.Stage, left_s: float) -> Entry:
        self.ran.append(stage.name)
        if stage.name in self._failing:
            return Entry(Status.FAILED, f"not finished within {left_s:.0f} s")
        return Entry(Status.DONE, rows=tuple(Row(name, 1.0) for name in stage.wanted(on_cpu=True)))


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return replace_stages(monkeypatch, Stages())


def replace_stages(monkeypatch: pytest.MonkeyPatch, stages: Stages) -> Stages:
    monkeypatch.setattr(qualify_4gpu, "run_stage", stages)
    monkeypatch.setattr(qualify_4gpu, "take_stamp", lambda _commit: CPU)
    return stages


def call(folder: Path, *words: str) -> int:
    return qualify_4gpu.main(["--out", str(folder), "--tiny", *words])


def test_only_runs_the_named_stages_and_keeps_what_was_there(stages: Stages, tmp_path: Path) -> None:
    assert call(tmp_path, "--only", "vae") == 0
    assert call(tmp_path, "--only", "link", "--only", "cache") == 0
    assert call(tmp_path, "--only", "link") == 0
    assert stages.ran == ["vae", "link", "cache", "link"]
    kept = json.loads((tmp_path / FILE_NAME).read_text())["stages"]
    assert sorted(kept) == ["cache", "link", "vae"]


def test_call_without_only_runs_what_has_no_complete_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = replace_stages(monkeypatch, Stages(failing=("layout-tp4", "agent")))
    assert call(tmp_path) == 1
    assert first.ran == [stage.name for stage in STAGES if stage.name != "link-2"]
    assert "layout-tp4: failed: not finished" in capsys.readouterr().out
    second = replace_stages(monkeypatch, Stages())
    assert call(tmp_path) == 0
    assert second.ran == ["layout-tp4", "agent"]
    assert "every wanted row has its number" in capsys.readouterr().out


def test_stages_that_never_ran_come_before_those_that_missed(stages: Stages, tmp_path: Path) -> None:
    Record(is_tiny=True).put("link", Entry(Status.FAILED, "process 0 ended with 1"), tmp_path)
    assert call(tmp_path) == 0
    assert (stages.ran[0], stages.ran[-1]) == ("layout-sp4", "link")


def test_stage_beyond_the_budget_is_not_begun_and_counts_as_not_run(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--only", "link", "--budget", "70") == 1
    assert stages.ran == []
    assert "link: not run" in capsys.readouterr().out


def test_two_devices_serve_the_first_stage_alone_and_not_for_four(stages: Stages, tmp_path: Path) -> None:
    assert call(tmp_path, "--world", "2") == 0
    assert call(tmp_path) == 0
    assert stages.ran[:2] == ["link-2", "link"]
    with pytest.raises(SystemExit) as refused:
        call(tmp_path, "--world", "2", "--only", "layout-sp4")
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("gpus", "words"), [([], "no GPU here"), (["H200"] * 2, "2 GPUs here, 4 are needed")]
)
def test_too_few_devices_are_refused(
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(qualify_4gpu, "take_stamp", lambda _commit: CPU | {"gpus": gpus})
    assert qualify_4gpu.main(["--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert stages.ran == []


@pytest.mark.usefixtures("stages")
def test_rows_of_several_engines_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remark = "several versions of the engine"
    rows = tuple(Row(name, 1.0) for name in BY_NAME["link"].wants)
    other = Entry(Status.DONE, rows=rows, stamp={"engine": "old"})
    Record(is_tiny=True).put("link", other, tmp_path)
    assert call(tmp_path, "--only", "vae") == 0
    assert remark not in capsys.readouterr().out
    assert call(tmp_path) == 0
    assert remark in capsys.readouterr().out


# ---- the stages


def test_stages_cover_the_layouts_of_four_gpus_which_fit_the_released_model() -> None:
    layouts = {str(stage.layout) for stage in STAGES if stage.part == "layout"}
    assert layouts == {
        "--ulysses 4",
        "--tp 4",
        "--tp 2 --ulysses 2",
        "--ulysses 2 --cfg-parallel 2",
        "--ulysses 4 --hsdp",
        "--ulysses 2 --cfg-parallel 2 --hsdp",
        "--data-parallel 4 --dlo",
        "--ulysses 2 --data-parallel 2 --dlo",
        "--ulysses 4 --dlo --dlo-no-allgather",
    }
    for stage in STAGES:
        for model in (ModelConfig.released(), ModelConfig.tiny()):
            [world] = stage.worlds
            check(stage.layout or Layout(ulysses=world), model, launched=world)


def test_every_stage_has_its_function_and_fits_one_call() -> None:
    assert {stage.part for stage in STAGES} <= set(rank.PARTS)
    for part in rank.PARTS:
        path = Path(rank.__file__).with_name(f"{rank.MODULES[part]}.py")
        names = {
            node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert f"run_{part}" in names
    assert max(stage.limit(is_tiny=False) for stage in STAGES) < qualify_4gpu.BUDGET_S < 600


def test_cpu_owes_no_peak_of_device_memory() -> None:
    stage = BY_NAME["layout-sp4"]
    assert PEAK in stage.wanted(on_cpu=False)
    assert PEAK not in stage.wanted(on_cpu=True)
    assert STEP in stage.wanted(on_cpu=True)


# ---- processes


def test_nvlink_multicast_is_off_in_all_that_is_started() -> None:
    assert launch.environment(on_cpu=False).items() >= {
        ("NCCL_NVLS_ENABLE", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    }


WRITE_AND_HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


def started(folder: Path, *programs: str) -> launch.Started:
    commands = [["-c", program, str(folder / f"pid{number}")] for number, program in enumerate(programs)]
    return launch.start(commands, launch.environment(on_cpu=True), folder)


def pid_in(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    """Whether a process is over; who inherited it reaps it when it likes."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_hung_stage_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    running = started(tmp_path, WRITE_AND_HANG, WRITE_AND_HANG)
    children = [pid_in(tmp_path / f"pid{number}") for number in range(2)]
    end = launch.wait(running, 0.2)
    assert end.why == "not finished within 0 s"
    assert all(map(is_gone, [*children, *(process.pid for process in running.processes)]))


def test_failed_process_ends_the_others_and_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    running = started(tmp_path, "import time; time.sleep(600)", "import sys; sys.exit('the reason')")
    end = launch.wait(running, 300)
    assert end.why == "process 1 ended with 1: the reason"
    assert running.tails()["process1"] == ["the reason"]
    assert all(is_gone(process.pid) for process in running.processes)


def test_processes_that_all_end_well_have_no_complaint(tmp_path: Path) -> None:
    end = launch.wait(started(tmp_path, "pass", "pass"), 300)
    assert (end.codes, end.why) == ((0, 0), "")


def test_stage_that_lacks_something_is_not_run_and_keeps_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = rank.Rows(path)
    rows.add(Row("a", 1.0, "s", facts={"by_rank": [1, 2]}))
    with (
        pytest.raises(rank.NotHereError, match="no_such_package") as lacking,
        rank.needing("no_such_package"),
    ):
        pass
    rows.lack(str(lacking.value))
    found, lacks = qualify_4gpu.read_rows(path)
    assert found == [Row("a", 1.0, "s", facts={"by_rank": [1, 2]})]
    assert lacks == "the package no_such_package is not installed"
    assert qualify_4gpu.read_rows(tmp_path / "none") == ([], "")


def test_part_of_a_stage_runs_without_torch() -> None:
    code = "import sys, benchmarks.qualify_4gpu; sys.exit('torch' in sys.modules)"
    assert (
        os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", code], launch.environment(on_cpu=True))
        == 0
    )


def test_stamp_names_commit_and_versions() -> None:
    stamp = qualify_4gpu.take_stamp("abc")
    assert stamp["commit"] == "abc"
    assert {"at", "command", "cuda", "driver", "engine", "gpus", "nccl", "python", "torch", "triton"} <= set(
        stamp
    )


@pytest.mark.parametrize("program", ["false", "no-such-program"])
def test_program_that_fails_or_is_not_here_is_unknown(program: str) -> None:
    assert qualify_4gpu._said(program) == "unknown"


BARE = """
import importlib, sys, tempfile

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Nothing())
from benchmarks.four_gpus import rank
for module in sorted(set(rank.MODULES.values())):
    importlib.import_module(f"benchmarks.four_gpus.{module}")
place = rank.Place("group", 0, 4, "cpu", 0, True, 60.0, None, rank.Rows(None))
for module, part in (("farm_group", "run_group"), ("farm_agent", "run_agent")):
    try:
        getattr(importlib.import_module(f"benchmarks.four_gpus.{module}"), part)(place)
    except rank.NotHereError as error:
        print(error)
"""
ABSENT = (
    *("alembic", "av", "boto3", "cache_dit", "celery", "diffusers", "fastapi", "httpx", "PIL", "psycopg"),
    *(
        "pydantic",
        "pydantic_settings",
        "redis",
        "sqlalchemy",
        "structlog",
        "tokenizers",
        "transformers",
        "yaml",
    ),
)


def test_with_torch_alone_only_the_farm_stages_are_not_run_and_name_what_they_lack() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE, ",".join(ABSENT)],
        cwd=launch.ROOT,
        env=launch.environment(on_cpu=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the package av is not installed",
        "the package alembic is not installed",
    ]
