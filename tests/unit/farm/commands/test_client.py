"""What the commands say when the API refuses something."""

from pathlib import Path

import httpx
import pytest

from farm.cli import main


def test_refused_member_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [
        {"loc": "num_inference_steps", "msg": "num_inference_steps must be 1 to 200 (got 0)", "type": "x"},
        {"loc": "prompt", "msg": "too long", "type": "x"},
    ]
    answer = httpx.Response(422, json={"errors": errors})
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: answer)
    (tmp_path / "key").write_text("mk_live_x")
    words = ["submit", "A boat", "--url", "http://farm", "--key-file", str(tmp_path / "key")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said == "magi2-farm: num_inference_steps must be 1 to 200 (got 0)\nprompt: too long\n"
