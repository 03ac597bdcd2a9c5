"""`magi2-farm admin`: where passwords come from."""

import io

import pytest

from farm.cli import main, make_parser


def test_password_is_never_an_argument() -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["admin", "create", "alice", "--password", "x"])


def test_short_password_is_refused_before_the_database_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["admin", "create", "alice"]) == 2
    assert "12 to 1024" in capsys.readouterr().err


def test_unknown_role_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as raised:
        main(["admin", "create", "alice", "--role", "root"])
    assert raised.value.code == 2
