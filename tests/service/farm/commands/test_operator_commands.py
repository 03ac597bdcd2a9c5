"""What an operator runs: schema, keys, bucket, doctor; on real servers, in process."""

import io
import json

import psycopg
import pytest

from farm import audit
from farm.accounts import SCOPES, authenticate
from farm.audit import AuditQuery
from farm.cli import main
from farm.db.session import make_engine, unit_of_work
from farm.settings import Settings

pytestmark = pytest.mark.usefixtures("settings")


@pytest.fixture
def empty_database(settings: Settings, new_database, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the settings at a database that was never migrated."""
    del settings  # its variables are set first, and then changed here
    url = new_database("template1")
    monkeypatch.setenv("DATABASE_URL", url)
    return url


def test_migrate_brings_an_empty_database_to_the_newest_schema(
    empty_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "check"]) == 1
    assert main(["migrate"]) == 0
    assert main(["migrate", "check"]) == 0
    assert "not migrated" in capsys.readouterr().out
    with psycopg.connect(empty_database) as connection:
        assert connection.execute("SELECT count(*) FROM job").fetchone() == (0,)


def test_created_key_opens_until_it_is_revoked(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "create", "--account", "studio", "--name", "ci", "--scope", "videos:read"]) == 0
    key = capsys.readouterr().out.strip()
    engine = make_engine(settings, application="test")
    with unit_of_work(engine) as conn:
        assert authenticate(conn, key, settings.key_pepper).scopes == {"videos:read"}

    assert main(["key", "list", "--account", "studio", "--json"]) == 0
    shown = capsys.readouterr().out
    [listed] = json.loads(shown)
    assert (listed["name"], listed["revoked_at"]) == ("ci", None)
    assert key not in shown

    assert main(["key", "revoke", "--account", "studio", listed["id8"]]) == 0
    with unit_of_work(engine) as conn:
        assert authenticate(conn, key, settings.key_pepper) is None
    assert main(["key", "revoke", "--account", "studio", listed["id8"]]) == 2

    with unit_of_work(engine) as conn:
        entries = audit.list_entries(conn, AuditQuery(target=listed["id8"])).entries
    assert [(entry.actor, entry.action) for entry in entries] == [
        (audit.COMMAND_LINE, "key.revoke"),
        (audit.COMMAND_LINE, "key.create"),
    ]
    made = entries[1].after or {}
    assert (made["name"], made["scopes"]) == ("ci", ["videos:read"])
    assert [(change or {}).get("open") for change in (entries[0].before, entries[0].after)] == [True, False]
    assert key.split("_")[3] not in str(entries)
    engine.dispose()


def test_key_of_an_administrator_has_every_scope(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--admin", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["scopes"]) == set(SCOPES)
    assert main(["key", "create", "--admin", "--scope", "videos:read"]) == 2


def test_login_that_is_not_allowed_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create(name: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("a long and private phrase\n"))
        return main(["admin", "create", name])

    assert create("No Name") == 2
    assert "is no name for a login" in capsys.readouterr().err
    assert create("grace") == 0
    assert create("grace") == 2
    assert "there is a login grace already" in capsys.readouterr().err


def test_keys_of_another_account_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["key", "create", "--account", "studio"])
    capsys.readouterr()
    assert main(["key", "list", "--account", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_bucket_check_finds_the_bucket() -> None:
    assert main(["bucket", "init"]) == 0
    assert main(["bucket", "check"]) == 0


def test_bucket_that_is_missing_exits_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_S3_BUCKET", "no-such-bucket")
    assert main(["bucket", "check"]) == 3


def test_unreachable_database_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://farm:hush@127.0.0.1:1/farm")
    assert main(["key", "list"]) == 3
    assert "hush" not in capsys.readouterr().err


@pytest.mark.timeout(240)
def test_doctor_finds_a_healthy_farm_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {finding["part"]: finding for finding in json.loads(capsys.readouterr().out)}
    parts = {"database", "broker", "object store", "clock", "layouts", "encoder"}
    parts |= {"groups", "gpus", "gpu links", "numa", "memlock", "host memory", "layout"}
    assert set(findings) == parts | {"kernels", "hf kernels", "disk"}
    assert "swiglu7" in findings["kernels"]["message"]
