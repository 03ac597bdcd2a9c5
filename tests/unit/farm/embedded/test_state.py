"""What survives from one start of embedded mode to the next, and who may read it."""

import stat
from pathlib import Path

import pytest

from farm.embedded.process import EmbeddedError
from farm.embedded.state import Access, StateDirectory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_second_supervisor_is_refused_and_told_who_has_the_folder(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path / "state"), StateDirectory(tmp_path / "state")
    first.lock()
    with pytest.raises(EmbeddedError, match=r"process \d+.*FARM_STATE_DIR"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_secrets_are_drawn_once_and_private(tmp_path: Path) -> None:
    drawn = StateDirectory(tmp_path).secrets()
    assert StateDirectory(tmp_path).secrets() == drawn
    assert mode_of(tmp_path / "secrets.json") == 0o600
    assert StateDirectory(tmp_path / "other").secrets() != drawn


def test_api_port_stays_the_same(tmp_path: Path) -> None:
    port = StateDirectory(tmp_path).api_port()
    assert StateDirectory(tmp_path).api_port() == port


def test_access_is_unknown_before_the_first_start(tmp_path: Path) -> None:
    assert StateDirectory(tmp_path).access() is None


def test_access_is_kept_private(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.keep_access(Access("http://127.0.0.1:1", "mk_live_x"))
    assert StateDirectory(tmp_path).access() == Access("http://127.0.0.1:1", "mk_live_x")
    assert state.header_file.read_text() == "Authorization: Bearer mk_live_x\n"
    assert {mode_of(state.access_file), mode_of(state.header_file)} == {0o600}


def test_variables_of_the_servers_are_kept_private(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    assert state.variables() is None
    state.keep_variables({"DATABASE_URL": "postgresql://farm:secret@127.0.0.1/farm"})
    assert StateDirectory(tmp_path).variables() == {"DATABASE_URL": "postgresql://farm:secret@127.0.0.1/farm"}
    assert mode_of(tmp_path / "variables.json") == 0o600
