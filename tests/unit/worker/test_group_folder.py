import os
import subprocess
import sys

import pytest

from worker.devices import DeviceError
from worker.group_folder import ProcessMark, take_folder


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    yield process
    process.kill()
    process.wait()


def test_group_keeps_its_id_over_restarts(tmp_path):
    first = take_folder(tmp_path, "sp4", (0, 1))
    first.release()
    second = take_folder(tmp_path, "sp4", (0, 1))
    assert second.group_id == first.group_id
    second.release()


def test_device_belongs_to_one_agent_whatever_its_profile(tmp_path):
    first = take_folder(tmp_path, "sp4", (0, 1))
    with pytest.raises(DeviceError, match="device 1 belongs to another agent"):
        take_folder(tmp_path, "layerwise-1gpu", (1,))
    first.release()
    take_folder(tmp_path, "layerwise-1gpu", (1,)).release()


def test_agents_without_devices_share_a_host(tmp_path):
    folders = [take_folder(tmp_path, "tiny-cpu", ()) for _ in range(3)]
    assert len({folder.group_id for folder in folders}) == 3
    for folder in folders:
        folder.release()


def test_leftover_rank_of_a_dead_agent_is_killed(tmp_path, sleeper):
    folder = take_folder(tmp_path, "tiny-cpu", ())
    folder.tidy()
    folder.record([sleeper.pid])
    (folder.work_dir / "half-a-clip.mp4").write_bytes(b"x")
    assert folder.tidy() == [sleeper.pid]
    assert sleeper.wait() == -9
    assert list(folder.work_dir.iterdir()) == []
    folder.release()


@pytest.mark.parametrize("other", [{"started": 1}, {"boot_id": "another boot"}])
def test_process_that_only_has_the_same_pid_is_left_alone(tmp_path, sleeper, monkeypatch, other):
    folder = take_folder(tmp_path, "tiny-cpu", ())
    mark = ProcessMark.of(sleeper.pid)
    stale = ProcessMark(**{**vars(mark), **other})
    monkeypatch.setattr(ProcessMark, "of", staticmethod(lambda _pid: stale))
    folder.record([sleeper.pid])
    monkeypatch.undo()
    assert folder.tidy() == []
    assert sleeper.poll() is None
    folder.release()


def test_broken_pid_file_is_no_reason_not_to_start(tmp_path):
    folder = take_folder(tmp_path, "tiny-cpu", ())
    (folder.log_dir.parent / "ranks.json").write_text('[{"pid": 1')
    assert folder.tidy() == []
    folder.release()


def test_mark_of_a_process_that_waits_to_be_reaped_is_none(sleeper):
    assert ProcessMark.of(sleeper.pid) is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessMark.of(sleeper.pid) is None
