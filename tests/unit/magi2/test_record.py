"""The books of one render."""

import pytest
import torch

from magi2.errors import Stopped
from magi2.record import RunRecord, silent

CPU = torch.device("cpu")


def test_phase_is_reported_from_nothing_to_all_once() -> None:
    reports: list[tuple[str, int, int]] = []
    record = RunRecord(CPU, lambda *report: reports.append(report), lambda: False)
    with record.stage("denoise", 2) as done:
        done(1)
        done(2)
    with record.stage("mux", 1):
        pass
    assert reports == [("denoise", 0, 2), ("denoise", 1, 2), ("denoise", 2, 2), ("mux", 0, 1), ("mux", 1, 1)]
    assert list(record.stats().stage_durations) == ["denoise", "mux"]


def test_phase_does_not_begin_after_a_stop() -> None:
    record = RunRecord(CPU, silent, lambda: True)
    with pytest.raises(Stopped), record.stage("denoise", 2):
        pytest.fail("the phase began")


def test_phase_that_fails_has_no_duration() -> None:
    record = RunRecord(CPU, silent, lambda: False)
    with pytest.raises(ValueError, match="broken"), record.stage("denoise", 2):
        raise ValueError("broken")
    assert record.stats().stage_durations == {}
