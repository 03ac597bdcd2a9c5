"""The listener hears of commits, and goes on after its connection was cut."""

import threading
import time

import pytest

from farm.db.listen import Listener
from farm.outbox import CHANNEL


@pytest.fixture
def listener(settings):
    with Listener(settings, CHANNEL) as made:
        made.wait(0.01, threading.Event())  # connects
        yield made


def test_a_submit_wakes_the_listener(driver, listener):
    driver.submit()
    assert listener.wait(60, threading.Event())


def test_what_was_said_between_two_waits_is_not_lost(driver, listener):
    driver.submit()
    time.sleep(0.1)
    assert listener.wait(60, threading.Event())


def test_silence_ends_with_the_time_out(listener):
    assert not listener.wait(0.05, threading.Event())


def test_a_cut_connection_is_made_anew(driver, listener):
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'magi2-listener'"
    assert driver.sql(f"{cut} AND datname = current_database()") == [(True,)]
    stop = threading.Event()
    while listener._conn is not None:  # the server ends it a moment after it has said so
        assert not listener.wait(0.05, stop)
    listener.wait(0.01, stop)
    driver.submit()
    assert listener.wait(60, stop)


def test_a_database_that_is_away_costs_one_time_out(settings):
    away = settings.model_copy(update={"database_url": "postgresql+psycopg://farm@127.0.0.1:1/farm"})
    with Listener(away, CHANNEL) as listener:
        assert not listener.wait(0.05, threading.Event())
