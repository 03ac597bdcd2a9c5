"""The monitor's thread: fresh answers, a driver that hangs, and the figures of the last hour."""

import threading

import pytest

from worker.health import BusyTime, HealthMonitor
from worker.nvml import DeviceReading, Reading


class Reader:
    """Gives what the test says, and may hang."""

    def __init__(self):
        self.device = DeviceReading(0, memory_used_bytes=5 << 20, utilization_percent=40)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_closed = threading.Event()

    def read(self):
        self.may_answer.wait()
        return Reading([self.device])

    def close(self):
        self.is_closed.set()


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def monitor(reader):
    made = HealthMonitor(reader, every_s=3600, answer_s=30)
    made.start()
    yield made
    reader.may_answer.set()
    made.stop()
    assert reader.is_closed.wait(30)


def test_a_check_asks_anew(monitor, reader):
    assert monitor.check() == ""
    reader.device = DeviceReading(0, problem="device 0 is missing: Not Found")
    assert monitor.check() == "device 0 is missing: Not Found"
    assert monitor.stats()["problem"] == "device 0 is missing: Not Found"


def test_figures_go_into_the_groups_row(monitor):
    monitor.check()
    stats = monitor.stats()
    assert (stats["utilization_1h"], stats["devices"][0]["index"], stats["note"]) == (40, 0, "")
    assert monitor.device_memory_mb() == [5]


def test_a_driver_that_hangs_is_a_problem_and_holds_nobody_up(reader):
    reader.may_answer.clear()
    monitor = HealthMonitor(reader, answer_s=0.05)
    monitor.start()
    assert monitor.check() == "NVML has not answered for 0.05 s"
    assert monitor.stats()["devices"] == []
    monitor.stop()
    reader.may_answer.set()
    assert reader.is_closed.wait(30)


def test_busy_time_is_a_share_of_the_last_hour():
    now = [0.0]
    busy = BusyTime(lambda: now[0])
    assert busy.ratio() == 0
    busy.note(is_busy=True)
    busy.note(is_busy=True)
    now[0] = 600.0
    assert busy.ratio() == 1
    busy.note(is_busy=False)
    now[0] = 1200.0
    assert busy.ratio() == 0.5
    now[0] = 3900.0
    assert busy.ratio() == pytest.approx(300 / 3600, abs=1e-3)  # the first five minutes are out of sight
    now[0] = 9000.0
    assert busy.ratio() == 0
