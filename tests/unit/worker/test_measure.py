"""Peaks of memory: of this very process, and of devices that come and go."""

import threading

from worker.measure import MemoryWatch


def test_the_host_is_measured_and_devices_keep_their_highest_figure():
    figures = [[10, 20], [30, 5], [7], []]
    all_seen = threading.Event()

    def next_figures():
        if len(figures) == 1:
            all_seen.set()
            return figures[0]
        return figures.pop(0)

    with MemoryWatch(next_figures, every_s=0.01) as watch:
        assert all_seen.wait(60)
    peaks = watch.peaks()
    assert peaks["device_memory_mb"] == [30, 20]
    assert peaks["host_pss_mb"] > 1
    assert peaks["num_samples"] >= 1


def test_without_devices_there_are_no_figures_of_devices():
    with MemoryWatch(list, every_s=0.01) as watch:
        pass
    assert watch.peaks()["device_memory_mb"] == []
