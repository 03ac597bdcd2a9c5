"""A group of real rank processes under one supervisor thread, with the chaos engine; no database."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from magi2.contract import GenerationRequest
from tests.service.worker.harness import QUICK, chaos, descendants, is_alive, wait_until
from worker.engine_api import EngineError, InvalidInput, OutOfMemory, RenderRequest, RenderResult, Stopped
from worker.group import GpuGroup, GroupCrashError, GroupSpec, Stop
from worker.liveness import StallLimits
from worker.rank_process import TAIL_LINES

ROOT = Path(__file__).parents[3]
RESTLESS = replace(
    QUICK, stall=StallLimits(load_s=30, first_step_s=1, step_s=1, other_s=20), cancel_grace_s=0.3
)


@pytest.fixture
def environment():
    return {**os.environ, "MAGI2_TESTING": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def make_group(environment, tmp_path):
    """Return a function that makes a group; what it starts is ended with the test."""
    made = []

    def make(world=2, times=QUICK, engine="chaos", **members):
        spec = GroupSpec(
            profile="tiny-cpu",
            engine=engine,
            devices=tuple(range(world)) if world > 1 else (),
            world=world,
            ckpt_root=members.pop("ckpt_root", None),
            deterministic=False,
            environment=members.pop("environment", environment),
            log_dir=tmp_path / "logs",
        )
        made.append(GpuGroup(spec, times))
        return made[-1]

    yield make
    for group in made:
        group.kill()


def render(group, tmp_path, token="video_a.e1", steps=3, stop=lambda: Stop.GO_ON, seen=None, **script):
    """Run one scripted request and return its outcome."""
    request = GenerationRequest(chaos(**script), "272p", steps, seed=1)
    wanted = RenderRequest(token, request.to_json(), None, str(tmp_path / f"{token}.mp4"))
    news = (lambda _: None) if seen is None else seen.append
    return group.run([wanted], token, on_progress=news, stop=stop)[token]


def test_ranks_load_once_and_render_many_times(make_group, tmp_path):
    group = make_group()
    assert group.start()
    pids = group.pids
    for number in range(3):
        outcome = render(group, tmp_path, token=f"video_{number}.e1")
        assert isinstance(outcome, RenderResult)
        assert (tmp_path / f"video_{number}.e1.mp4").stat().st_size > 10_000
    assert (group.pids, group.is_ready, group.answers()) == (pids, True, True)
    assert group.fingerprint["engine"] == "chaos"


def test_reports_of_rank_0_arrive_in_order(make_group, tmp_path):
    group = make_group()
    group.start()
    seen = []
    render(group, tmp_path, steps=20, step_s=0.15, seen=seen)
    steps = [report.step for report in seen if report.phase == "denoise"]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3
    assert {report.request_id for report in seen} == {"video_a.e1"}


@pytest.mark.parametrize(
    ("do", "fault", "stays"),
    [
        ("engine_error", EngineError, True),
        ("out_of_memory", OutOfMemory, False),
        ("invalid_input", InvalidInput, True),
    ],
)
def test_typed_fault_of_a_single_rank_group(make_group, tmp_path, do, fault, stays):
    group = make_group(world=1)
    group.start()
    assert isinstance(render(group, tmp_path, do=do), fault)
    assert group.is_ready is stays


def test_request_that_is_refused_is_refused_by_all_ranks_alike(make_group, tmp_path):
    group = make_group()
    group.start()
    assert isinstance(render(group, tmp_path, do="invalid_input"), InvalidInput)
    assert isinstance(render(group, tmp_path, token="video_b.e1"), RenderResult)


@pytest.mark.parametrize("rank", [0, 1])
def test_fault_of_one_rank_ends_the_wait_of_the_others(make_group, tmp_path, rank):
    group = make_group()
    group.start()
    pids = group.pids
    assert isinstance(render(group, tmp_path, do="engine_error", rank=rank), EngineError)
    assert not group.is_ready
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("do", "exit_code"), [("sigkill", -9), ("exit", 3), ("crash", 70)])
def test_end_of_one_rank_is_the_end_of_all(make_group, tmp_path, do, exit_code, rank):
    group = make_group()
    group.start()
    pids = group.pids
    with pytest.raises(GroupCrashError) as crash:
        render(group, tmp_path, do=do, rank=rank)
    evidence = crash.value.evidence
    assert (evidence["rank"], evidence["exit_code"]) == (rank, exit_code)
    assert set(evidence["log"]) == {"0", "1"}
    assert not any(is_alive(pid) for pid in pids)
    assert group.start()
    assert isinstance(render(group, tmp_path, token="video_b.e1"), RenderResult)


def test_all_ranks_leave_at_the_same_step(make_group, tmp_path):
    group = make_group()
    group.start()
    seen = []
    outcome = render(
        group,
        tmp_path,
        steps=200,
        step_s=0.05,
        seen=seen,
        stop=lambda: Stop.AT_STEP if seen[3:] else Stop.GO_ON,
    )
    assert isinstance(outcome, Stopped)
    assert group.is_ready
    assert isinstance(render(group, tmp_path, token="video_b.e1"), RenderResult)


def test_stale_stop_does_not_touch_the_next_run(make_group, tmp_path):
    group = make_group(world=1)
    group.start()
    render(group, tmp_path, steps=50, step_s=0.05, stop=lambda: Stop.AT_STEP)
    assert isinstance(render(group, tmp_path, token="video_a.e2"), RenderResult)


def test_ranks_that_ignore_a_stop_are_killed_after_the_grace(make_group, tmp_path):
    group = make_group(times=RESTLESS)
    group.start()
    outcome = render(group, tmp_path, steps=200, step_s=0.05, ignore_stop=True, stop=lambda: Stop.AT_STEP)
    assert isinstance(outcome, Stopped)
    assert group.pids == []


@pytest.mark.parametrize("do", ["freeze", "sigstop", "hog_gil"])
def test_rank_without_progress_is_a_stall_whatever_else_of_it_runs(make_group, tmp_path, do):
    group = make_group(times=RESTLESS)
    group.start()
    pids = group.pids
    stalls = []

    def stop():
        stalls.extend(filter(None, [group.stall()]))
        return Stop.NOW if stalls else Stop.GO_ON

    assert isinstance(render(group, tmp_path, do=do, rank=1, steps=5, stop=stop), Stopped)
    assert "no progress" in stalls[0]
    assert not any(is_alive(pid) for pid in pids)


def test_slow_but_moving_ranks_are_no_stall(make_group, tmp_path):
    """A render that takes longer than a step may, in steps that are far from it."""
    limits = StallLimits(load_s=30, first_step_s=3, step_s=3, other_s=20)
    group = make_group(world=1, times=replace(QUICK, stall=limits))
    group.start()
    stalls = []

    def stop():
        stalls.append(group.stall())
        return Stop.GO_ON

    render(group, tmp_path, steps=8, step_s=0.5, stop=stop)
    assert set(stalls) == {None}


def test_idle_group_has_no_stall(make_group):
    group = make_group(world=1, times=RESTLESS)
    assert group.stall() is None
    group.start()
    assert group.stall() is None


def test_failure_of_the_caller_leaves_no_rank_at_work(make_group, tmp_path):
    group = make_group()
    group.start()
    pids = group.pids

    def stop():
        raise LookupError("the caller's own")

    with pytest.raises(LookupError):
        render(group, tmp_path, steps=200, step_s=0.05, stop=stop)
    assert not any(is_alive(pid) for pid in pids)


def test_loading_that_fails_says_why(make_group, tmp_path):
    script = tmp_path / "loading"
    script.write_text(chaos(do="crash", rank=1))
    group = make_group(ckpt_root=str(script))
    with pytest.raises(GroupCrashError, match="rank 1: RuntimeError: chaos: a defect") as crash:
        group.start()
    assert (crash.value.evidence["phase"], crash.value.evidence["refused"]) == ("load", False)
    assert group.pids == []


def test_loading_can_be_given_up(make_group, tmp_path):
    script = tmp_path / "loading"
    script.write_text(chaos(load_s=60))
    group = make_group(world=1, ckpt_root=str(script))
    assert group.start(give_up=lambda: True) is False
    assert group.pids == []


def test_loading_that_takes_too_long_is_a_failure(make_group, tmp_path):
    script = tmp_path / "loading"
    script.write_text(chaos(load_s=60))
    limits = replace(QUICK, stall=StallLimits(load_s=1))
    group = make_group(world=1, ckpt_root=str(script), times=limits)
    started = []
    with pytest.raises(GroupCrashError, match=r"no progress .* in load"):
        group.start(on_started=started.extend)
    assert started
    assert not any(is_alive(pid) for pid in started)


@pytest.mark.parametrize("engine", ["chaos", "null"])
def test_engines_of_the_tests_refuse_a_production_environment(make_group, environment, engine):
    del environment["MAGI2_TESTING"]
    group = make_group(world=1, engine=engine)
    with pytest.raises(GroupCrashError, match="MAGI2_TESTING=1") as crash:
        group.start()
    assert crash.value.evidence["refused"]


def test_null_engine_hands_out_a_file_at_once(make_group, tmp_path):
    group = make_group(engine="null")
    group.start()
    assert isinstance(render(group, tmp_path), RenderResult)
    assert (tmp_path / "video_a.e1.mp4").is_file()


def test_output_of_ranks_is_kept_in_a_file_and_its_end_in_memory(make_group, tmp_path):
    group = make_group(world=1)
    group.start()
    with pytest.raises(GroupCrashError) as crash:
        render(group, tmp_path, do="crash")
    tail = crash.value.evidence["log"]["0"]
    assert 0 < len(tail) <= TAIL_LINES
    assert tail[-1] in (tmp_path / "logs" / "rank0.log").read_text()


def test_ranks_see_no_credentials_and_one_device_each(make_group, environment):
    secrets = {"DATABASE_URL": "postgresql://u:p@h/d", "AWS_SECRET_ACCESS_KEY": "s", "FARM_SECRET_KEY": "k"}
    group = make_group(environment={**environment, **secrets})
    group.start()
    for index, pid in enumerate(group.pids):
        raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        seen = dict(entry.decode().partition("=")[::2] for entry in raw if entry)
        assert not set(seen) & set(secrets)
        assert seen["CUDA_VISIBLE_DEVICES"] == str(index)
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(index), "2")
        assert seen["MAGI2_DETERMINISTIC"] == "0"


def test_ranks_die_with_the_thread_that_started_them_only(make_group):
    """The agent's loop starts them: a ring that asked for it may end at once."""
    group = make_group(world=1)
    wanted, started, leave = threading.Event(), threading.Event(), threading.Event()

    def supervisor():
        wanted.wait(60)
        group.start()
        started.set()
        leave.wait(60)

    loop = threading.Thread(target=supervisor)
    loop.start()
    ring = threading.Thread(target=wanted.set)
    ring.start()
    ring.join()
    assert started.wait(60)
    (pid,) = group.pids
    assert is_alive(pid)
    assert group.answers()
    leave.set()
    loop.join()
    wait_until(lambda: not is_alive(pid), "the rank following its supervisor thread")


def test_group_refuses_a_second_supervisor_thread(make_group):
    group = make_group(world=1)
    group.start()
    failures = []

    def intrude():
        try:
            group.start()
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert "one supervisor thread" in failures[0]


def test_kill_takes_what_the_ranks_have_started_too(make_group, tmp_path):
    group = make_group(world=1)
    group.start()
    render(group, tmp_path, do="start_child")
    family = [*group.pids, *descendants(group.pids[0])]
    assert len(family) == 2
    group.kill()
    wait_until(lambda: not any(map(is_alive, family)), "the end of the rank and of its child")


def test_dead_rank_of_an_idle_group_is_noticed(make_group):
    group = make_group()
    group.start()
    os.kill(group.pids[1], signal.SIGKILL)
    wait_until(lambda: not group.is_ready, "the end of the rank being seen")
    assert not group.answers()


def test_stopped_rank_of_an_idle_group_does_not_answer(make_group):
    group = make_group(times=replace(QUICK, ping_s=0.5))
    group.start()
    os.kill(group.pids[1], signal.SIGSTOP)
    # A stop takes hold when the process is next scheduled; until then it may still answer.
    stat = Path(f"/proc/{group.pids[1]}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the rank having stopped")
    assert not group.answers()


def test_long_prompts_fit_through_the_pipe(make_group, tmp_path):
    group = make_group(world=1)
    group.start()
    request = GenerationRequest("\N{SNOWMAN}" * 60_000, "272p", 1, seed=1)
    wanted = RenderRequest("video_a.e1", request.to_json(), None, str(tmp_path / "long.mp4"))
    outcome = group.run([wanted], "video_a.e1", on_progress=lambda _: None, stop=lambda: Stop.GO_ON)
    assert isinstance(outcome["video_a.e1"], RenderResult)


def test_rank_that_does_not_read_is_a_crash_and_not_a_hang(make_group, tmp_path, monkeypatch):
    monkeypatch.setattr("worker.rank_process.SEND_TIMEOUT_S", 0.5)
    group = make_group(world=1)
    group.start()
    os.kill(group.pids[0], signal.SIGSTOP)
    # The signal is delivered later than `kill` returns; until then the rank goes on reading.
    os.waitid(os.P_PID, group.pids[0], os.WSTOPPED | os.WNOWAIT)
    request = GenerationRequest(json.dumps("x" * 59_000), "272p", 1, seed=1).to_json()
    requests = [RenderRequest(f"video_{i}.e1", request, None, str(tmp_path / "x.mp4")) for i in range(4)]
    with pytest.raises(GroupCrashError, match="nothing was read"):
        group.run(requests, "wave", on_progress=lambda _: None, stop=lambda: Stop.GO_ON)


def test_several_requests_come_back_by_their_ids(make_group, tmp_path):
    group = make_group(world=1)
    group.start()
    good = GenerationRequest("A fox.", "272p", 1, seed=1).to_json()
    bad = GenerationRequest(chaos(do="invalid_input"), "272p", 1, seed=1).to_json()
    requests = [
        RenderRequest("video_a.e1", good, None, str(tmp_path / "a.mp4")),
        RenderRequest("video_b.e1", bad, None, str(tmp_path / "b.mp4")),
        RenderRequest("video_c.e1", good, None, str(tmp_path / "c.mp4")),
    ]
    outcomes = group.run(requests, "wave", on_progress=lambda _: None, stop=lambda: Stop.GO_ON)
    assert [type(outcome) for outcome in outcomes.values()] == [RenderResult, InvalidInput, RenderResult]
    assert list(outcomes) == ["video_a.e1", "video_b.e1", "video_c.e1"]
