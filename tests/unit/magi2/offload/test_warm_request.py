"""The benchmark of a warm request runs at tiny sizes: three clips, all checked, and the transformer stays."""

import json
from pathlib import Path

import pytest

from benchmarks import stream_gpu


@pytest.mark.timeout(600)
def test_tiny_request_is_rendered_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["stream_gpu", "--out", str(tmp_path), "--only", "request", "--tiny", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", words)
    assert stream_gpu.main() == 0
    rows = json.loads((tmp_path / "stream_gpu.json").read_text("utf-8"))["rows"]
    assert [row["row"].rpartition(", ")[2] for row in rows] == [
        "first",
        "warm",
        "warm again",
        "transformer stayed where it was",
    ]
    for row in rows[:3]:
        assert list(row["phases"]) == ["text_encode", "denoise", "decode_audio", "decode_video", "mux"]
        assert row["breaches"] == []
