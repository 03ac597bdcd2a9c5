"""Units of work commit or roll back as a whole, and every connection has its time-outs."""

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from farm.db.session import async_unit_of_work, make_async_engine, make_engine, unit_of_work

COUNT = text("SELECT count(*) FROM account")
ADD = text("INSERT INTO account (id, name) VALUES ('a', 'a')")


def test_a_unit_of_work_commits_at_its_end(database):
    with unit_of_work(database) as conn:
        conn.execute(ADD)
    with unit_of_work(database) as conn:
        assert conn.execute(COUNT).scalar_one() == 1


def test_an_exception_rolls_it_back(database):
    def add_and_fail():
        with unit_of_work(database) as conn:
            conn.execute(ADD)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        add_and_fail()
    with unit_of_work(database) as conn:
        assert conn.execute(COUNT).scalar_one() == 0


async def test_the_async_unit_of_work_does_the_same(settings):
    engine = make_async_engine(settings, application="test")

    async def add_and_fail():
        async with async_unit_of_work(engine) as conn:
            await conn.run_sync(lambda sync: sync.execute(ADD))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        await add_and_fail()
    async with async_unit_of_work(engine) as conn:
        assert (await conn.execute(COUNT)).scalar_one() == 0
        await conn.execute(ADD)
    async with async_unit_of_work(engine) as conn:
        assert (await conn.execute(COUNT)).scalar_one() == 1
    await engine.dispose()


@pytest.mark.parametrize(("application", "statement"), [("api", "5s"), ("agent", "5s"), ("ticker", "15s")])
def test_every_connection_has_the_time_outs_of_its_role(settings, application, statement):
    engine = make_engine(settings, application=application)
    names = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "application_name"]
    with unit_of_work(engine) as conn:
        found = [conn.execute(text(f"SHOW {name}")).scalar_one() for name in names]
    engine.dispose()
    assert found == [statement, "2s", "10s", f"magi2-{application}"]


def test_an_error_does_not_repeat_the_values_that_were_sent(database):
    def fail():
        with unit_of_work(database) as conn:
            conn.execute(
                text("SELECT CAST(:prompt AS integer) / 0 FROM nowhere"), {"prompt": "a private wish"}
            )

    with pytest.raises(DBAPIError) as failure:
        fail()
    assert "a private wish" not in str(failure.value)


def test_a_connection_that_the_server_closed_is_replaced(database, settings):
    with unit_of_work(database) as conn:
        pid = conn.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with psycopg.connect(settings.database_url.replace("+psycopg", ""), autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [pid])
    with unit_of_work(database) as conn:
        assert conn.execute(text("SELECT pg_backend_pid()")).scalar_one() != pid
