"""A command run in this process, with what it said and its exit code."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from magi2.__main__ import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def magi2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.delenv("MAGI2_CKPT_ROOT", raising=False)

    def run(*words: object) -> Outcome:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return run
