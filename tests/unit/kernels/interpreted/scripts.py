"""The benchmark of the kernels runs from end to end: interpreted, small, with the attention of the CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import bench, measure, roofline
from kernels.gpu import experts, flash
from tests.unit.kernels.interpreted import exact

exact.use()

SMALL = {
    "MOE_HEADS": 2,
    "NUM_EXPERTS": 8,
    "MOE_WIDTH": 64,
    "EXPERT_WIDTH": 32,
    "MOE_TOKENS": 33,
    "TOKENS": 5,
    "WIDTH": 96,
    "HEADS": 3,
    "ATTENTION_HEADS": 2,
    "SEGMENT": 70,
}


def test_every_part_is_checked_recorded_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = torch.device("cpu")
    for name, size in SMALL.items():
        monkeypatch.setattr(bench, name, size)
    monkeypatch.setattr(bench, "CUDA", cpu)

    def once(work: object, **_named: object) -> float:
        return measure.median_ms(work, cpu, repeats=1, warm=0)

    monkeypatch.setattr(bench, "median_ms", once)
    monkeypatch.setattr(bench, "TILES", {"triton": experts.run_tiles})
    reached = measure.Ceilings(776e12, 4.28e12, 1.4, 1.0)
    monkeypatch.setattr(measure, "ceilings", lambda _device: reached)
    monkeypatch.setattr(
        flash,
        "_KERNELS",
        dict.fromkeys(("cudnn", "flash2"), ("_scaled_dot_product_flash_attention_for_cpu", ())),
    )
    out, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    assert bench.main(["--out", str(out), "--plot", str(plot)]) == 0
    record = json.loads(out.read_text("utf-8"))
    drawn = {point.name.removesuffix(", torch") for point in roofline.points(record)}
    withdrawn = {"mhc pair: post, gates, pre"}
    assert set(roofline.WORK) - drawn <= withdrawn | {"experts, hopper: tiles"}
    assert plot.read_text("utf-8") == roofline.draw(record)
    assert "swiglu7: " in capsys.readouterr().out
