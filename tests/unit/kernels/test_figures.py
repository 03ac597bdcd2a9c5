"""The page on kernels agrees with the stored record of the benchmark."""

import json
import re
from pathlib import Path

from benchmarks.kernels import roofline

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/kernels.md").read_text("utf-8")
RECORD = json.loads((ROOT / "benchmarks/results/kernels-h200.json").read_text("utf-8"))
ROWS = {row["kernel"]: row for row in RECORD["rows"]}
# | operation | `row of the record` | ms | rate | ...
FIGURE = re.compile(r"^\|[^|]+\| `(?P<name>[^`]+)` \| (?P<ms>[\d.]+) \| (?P<rate>[^|]*) \|", re.MULTILINE)


def test_page_states_the_recorded_times_and_rates() -> None:
    found = list(FIGURE.finditer(PAGE))
    assert len(found) >= 12
    for figure in found:
        row = ROWS[figure["name"]]
        assert figure["ms"] == f"{row['ms']:.3f}"
        expected = (
            {f"{row['tflops']} TFLOP/s"} if "tflops" in row else {f"{row.get('x_floor', 0):.2f} x floor"}
        )
        assert figure["rate"].strip() in expected | {""}


def test_page_names_the_machine_and_the_commit_of_the_record() -> None:
    for name in ("device", "torch", "triton", "commit"):
        assert RECORD[name] in PAGE


def test_every_recorded_check_passed() -> None:
    assert [row["kernel"] for row in RECORD["rows"] if not row["ok"]] == []


def test_roofline_is_drawn_from_the_record_and_shown() -> None:
    assert (ROOT / "docs/img/kernels-h200.svg").read_text("utf-8") == roofline.draw(RECORD)
    assert "](img/kernels-h200.svg)" in PAGE


def test_roofline_agrees_with_the_recorded_shares() -> None:
    for point in roofline.points(RECORD):
        row = ROWS[point.name]
        if "x_floor" in row and point.name != "mhc pair: post, gates, pre":
            assert abs(point.of_roof * row["x_floor"] - 1) <= 0.03
        if "share" in row:
            assert abs(point.of_roof - row["share"]) <= 0.01
