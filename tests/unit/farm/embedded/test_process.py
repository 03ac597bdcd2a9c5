"""Children of embedded mode: their logs, their end, and their leash."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farm.embedded.process import Child, ChildSpec, EmbeddedError, leashed, log_tail
from farm.embedded.roles import Role, RoleProcess

IGNORES_TERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("on", flush=True)
time.sleep(600)
"""
# Starts a leashed sleep, says its number, and waits to be killed.
HOLDER = """
import subprocess, sys, time
from farm.embedded.process import leashed
child = subprocess.Popen(leashed([sys.executable, "-c", "import time; time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


def start(tmp_path: Path, code: str) -> Child:
    command = [sys.executable, "-c", code]
    return Child(ChildSpec("child", command, tmp_path, tmp_path / "child.log", os.environ))


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    child = start(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    assert child.wait(60)
    assert sorted(log_tail(tmp_path / "child.log").split()) == ["err", "out"]


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = start(tmp_path, IGNORES_TERM)
    wait_until(lambda: "on" in log_tail(tmp_path / "child.log"))
    child.stop(signal.SIGTERM, timeout_s=0.2)
    assert child.returncode == -signal.SIGKILL


def test_child_that_ends_before_it_is_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    child = start(tmp_path, "import sys; sys.exit('no port')")
    with pytest.raises(EmbeddedError, match=r"(?s)child ended with exit code 1.*no port"):
        child.wait_ready(lambda: False, timeout_s=60)


def test_child_that_never_gets_ready_is_killed_and_reported(tmp_path: Path) -> None:
    child = start(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(EmbeddedError, match="did not answer"):
        child.wait_ready(lambda: False, timeout_s=0.1)
    assert child.returncode is not None


def test_large_log_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_bytes(b"x" * 9 * 1024 * 1024)
    assert start(tmp_path, "print('new')").wait(60)
    assert log_tail(log) == "new"
    assert (tmp_path / "child.log.1").stat().st_size == 9 * 1024 * 1024


def test_leashed_child_dies_with_its_killed_parent() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())
    status = Path(f"/proc/{pid}/status")
    assert status.exists()
    wait_until(lambda: "farm/embedded/leash.py" not in Path(f"/proc/{pid}/cmdline").read_text())
    holder.kill()
    holder.communicate()
    wait_until(lambda: not status.exists() or "\nState:\tZ" in status.read_text())


def test_leash_reports_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program")
    tried = subprocess.run(leashed([str(text)]), capture_output=True, text=True, check=False)
    assert tried.returncode != 0
    assert f"cannot execute {text}" in tried.stderr


def test_role_that_ends_is_started_again_after_a_pause(tmp_path: Path) -> None:
    role = RoleProcess(Role("api", "platform"), os.environ, tmp_path / "logs", tmp_path)
    first = role.child
    assert first.wait(60)
    assert "api ended with exit code 0; starting it again in 0.5 s" in role.keep_running()
    assert role.keep_running() is None
    assert role.child is first
    wait_until(lambda: role.keep_running() is None and role.child is not first)
    assert role.child.wait(60)
    assert "in 1 s" in role.keep_running()
