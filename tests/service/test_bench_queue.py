"""The queue's benchmark runs: a row says what it measured, and one without a number is a failure."""

import json

import pytest

from benchmarks import job_queue


def test_claims_are_measured_and_exact(capsys):
    status = job_queue.main(["--scale", "0.002", "--only", "claims"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == 0
    assert [line["id"] for line in lines[:2]] == ["T-07", "T-07"]
    assert all("0 twice, 0 miscounts" in line["value"] for line in lines[:2])
    assert lines[1]["is_met"]


def test_row_without_a_number_is_a_failure(capsys, monkeypatch):
    def never(_):
        raise TimeoutError("not within 1 s: an end")

    monkeypatch.setitem(job_queue.SCENARIOS, "cancel", never)
    assert job_queue.main(["--only", "cancel"]) == 1
    assert "an end" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "value"), [(0.5, 3), (0.99, 5), (0.0, 1)])
def test_percentile_is_a_value_that_was_measured(share, value):
    assert job_queue.percentile([5, 1, 3, 2, 4], share) == value
