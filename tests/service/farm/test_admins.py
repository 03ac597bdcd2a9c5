"""Logins of the dashboard, their sessions and the audit log, on a real database."""

from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from farm import admins, audit
from farm.admin_sessions import close_session, find_session, open_session, refresh, rotate
from farm.admins import MAX_FAILURES, NameTakenError, Role
from farm.audit import AuditQuery, list_entries
from farm.db.session import unit_of_work
from farm.errors import InvalidFieldError, NotFoundError

PASSWORD = "a long enough password"
BY = "system:cli"


@pytest.fixture(scope="module")
def password_hash() -> str:
    return admins.hash_password(PASSWORD)


@pytest.fixture
def alice(database: sa.Engine, password_hash: str) -> admins.Admin:
    with unit_of_work(database) as conn:
        return admins.create(conn, "alice", Role.OPERATOR, password_hash, by=BY)


def entries(database: sa.Engine, **query: str) -> list[audit.Entry]:
    with database.connect() as conn:
        return list_entries(conn, AuditQuery(**query)).entries


def move_clock(database: sa.Engine, table: str, column: str, by: timedelta) -> None:
    with database.begin() as conn:
        conn.execute(text(f"UPDATE {table} SET {column} = {column} - :by"), {"by": by})


@pytest.mark.req("F-50")
@pytest.mark.usefixtures("alice")
def test_password_is_stored_as_argon2id_only(database):
    with database.connect() as conn:
        stored = conn.execute(text("SELECT to_jsonb(u)::text FROM admin_user u")).scalar_one()
        found = admins.credentials_of(conn, "alice")
    assert "$argon2id$" in stored
    assert PASSWORD not in stored
    assert admins.is_password(found, PASSWORD)
    assert not admins.is_password(found, PASSWORD + " ")


@pytest.mark.req("F-50")
@pytest.mark.usefixtures("alice")
def test_unknown_login_fits_no_password_and_costs_a_hash(database):
    with database.connect() as conn:
        nobody, real = admins.credentials_of(conn, "nobody"), admins.credentials_of(conn, "alice")
    assert not admins.is_password(nobody, PASSWORD)
    # Same algorithm and parameters: m, t and p stand before the salt.
    assert nobody.password_hash.split("$")[:4] == real.password_hash.split("$")[:4]


@pytest.mark.req("F-50")
@pytest.mark.usefixtures("alice")
def test_too_many_wrong_passwords_lock_a_login_for_a_while(database):
    with unit_of_work(database) as conn:
        for _ in range(MAX_FAILURES):
            assert admins.is_password(admins.credentials_of(conn, "alice"), PASSWORD)
            admins.note_failure(conn, "alice", ip="10.0.0.9")
        assert not admins.is_password(admins.credentials_of(conn, "alice"), PASSWORD)
    move_clock(database, "admin_user", "locked_until", timedelta(seconds=admins.LOCKED_S + 1))
    with database.connect() as conn:
        assert admins.is_password(admins.credentials_of(conn, "alice"), PASSWORD)
    [locked] = entries(database, action="admin.lock")
    assert (locked.actor, locked.target, locked.ip) == ("system", "alice", "10.0.0.9")


def test_success_forgets_wrong_passwords(database, alice):
    with unit_of_work(database) as conn:
        for _ in range(MAX_FAILURES - 1):
            admins.note_failure(conn, "alice", ip=None)
        admins.note_success(conn, alice.id, ip=None)
        admins.note_failure(conn, "alice", ip=None)
        assert admins.credentials_of(conn, "alice").is_open


@pytest.mark.usefixtures("alice")
def test_names_are_unique_and_plain(database, password_hash):
    with pytest.raises(NameTakenError), unit_of_work(database) as conn:
        admins.create(conn, "alice", Role.VIEWER, password_hash, by=BY)
    for name in ("", "Alice", "a b", "<b>", "-a", "x" * 64):
        with pytest.raises(InvalidFieldError), unit_of_work(database) as conn:
            admins.create(conn, name, Role.VIEWER, password_hash, by=BY)
    with pytest.raises(InvalidFieldError, match="12 to 1024"):
        admins.hash_password("short")


@pytest.mark.req("F-50")
def test_session_is_found_by_its_cookie_and_stored_as_a_digest(database, alice):
    with unit_of_work(database) as conn:
        token = open_session(conn, alice.id)
    with database.connect() as conn:
        found = find_session(conn, token)
        stored = conn.execute(text("SELECT to_jsonb(s)::text FROM admin_session s")).scalar_one()
        assert find_session(conn, token + "x") is None
    assert found is not None
    assert (found.name, found.role, found.is_due) == ("alice", Role.OPERATOR, False)
    assert found.is_csrf(found.csrf)
    assert not found.is_csrf("")
    assert token not in stored


@pytest.mark.req("F-50")
def test_session_takes_a_new_id_and_the_former_one_soon_ends(database, alice):
    with unit_of_work(database) as conn:
        first = open_session(conn, alice.id)
    move_clock(database, "admin_session", "rotated_at", timedelta(minutes=20))
    with unit_of_work(database) as conn:
        session = find_session(conn, first)
        assert session.is_due
        second = rotate(conn, session)
        assert rotate(conn, session) is None
        assert find_session(conn, first).csrf == find_session(conn, second).csrf
        assert not find_session(conn, second).is_due
        assert refresh(conn, session).name == "alice"
    move_clock(database, "admin_session", "rotated_at", timedelta(seconds=61))
    with database.connect() as conn:
        assert refresh(conn, session) is not None
        assert find_session(conn, first) is None
        assert find_session(conn, second) is not None


@pytest.mark.req("F-50")
def test_session_ends_after_eight_hours_by_logout_and_with_its_login(database, alice, password_hash):
    def opened():
        with unit_of_work(database) as conn:
            return open_session(conn, alice.id)

    def is_open(token):
        with database.connect() as conn:
            return find_session(conn, token) is not None

    old = opened()
    move_clock(database, "admin_session", "expires_at", timedelta(hours=8))
    assert not is_open(old)
    left = opened()
    with unit_of_work(database) as conn:
        close_session(conn, find_session(conn, left))
    assert not is_open(left)
    changed = opened()
    with unit_of_work(database) as conn:
        admins.change_password(conn, "alice", password_hash, by=BY)
    assert not is_open(changed)
    closed = opened()
    with unit_of_work(database) as conn:
        admins.set_enabled(conn, "alice", is_enabled=False, by=BY)
        assert not admins.credentials_of(conn, "alice").is_open
    assert not is_open(closed)


def test_role_is_read_with_each_request(database, alice):
    with unit_of_work(database) as conn:
        token = open_session(conn, alice.id)
        admins.change_role(conn, "alice", Role.VIEWER, by="admin:bob")
        assert find_session(conn, token).role is Role.VIEWER
    [change] = entries(database, action="admin.role")
    assert (change.actor, change.before, change.after) == (
        "admin:bob",
        {"role": "operator"},
        {"role": "viewer"},
    )


def test_unknown_login_cannot_be_changed(database, password_hash):
    with pytest.raises(NotFoundError), unit_of_work(database) as conn:
        admins.change_password(conn, "nobody", password_hash, by=BY)


@pytest.mark.req("F-50")
@pytest.mark.parametrize("statement", ["UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log"])
@pytest.mark.usefixtures("alice")
def test_audit_log_is_append_only(database, statement):
    with pytest.raises(DBAPIError, match="append only"), database.begin() as conn:
        conn.execute(text(statement))
    assert [entry.action for entry in entries(database)] == ["admin.create"]


def test_audit_entry_disappears_with_the_change_it_tells_of(database):
    def change_that_fails():
        with unit_of_work(database) as conn:
            audit.record(conn, "admin:alice", "job.cancel", "video_1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change_that_fails()
    assert entries(database) == []


@pytest.mark.req("F-50")
def test_audit_entry_keeps_before_and_after_without_secrets(database):
    before = {"state": "queued", "signing_secret": "whsec_abc", "nested": {"password": "x", "n": 1}}
    with unit_of_work(database) as conn:
        audit.record(conn, "admin:alice", "x.change", "x1", before, {"text": "y" * 2000}, ip="::1")
    [entry] = entries(database, target="x1")
    assert entry.before == {
        "state": "queued",
        "signing_secret": audit.MASK,
        "nested": {"password": audit.MASK, "n": 1},
    }
    assert len(entry.after["text"]) < 600
    assert (entry.actor, entry.ip) == ("admin:alice", "::1")


def test_audit_pages_go_back_in_time(database):
    with unit_of_work(database) as conn:
        for number in range(5):
            audit.record(conn, "system", "x.change", f"x{number}")
    with database.connect() as conn:
        first = list_entries(conn, AuditQuery(limit=3))
        second = list_entries(conn, AuditQuery(limit=3, before_id=first.entries[-1].id))
    assert [entry.target for entry in first.entries + second.entries] == ["x4", "x3", "x2", "x1", "x0"]
    assert (first.has_more, second.has_more) == (True, False)
