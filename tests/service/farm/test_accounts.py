"""Keys against stored hashes, and counters against a recount."""

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from farm import accounts
from farm.accounts import Miscount, create_key, make_key, revoke_key
from farm.db.session import unit_of_work
from farm.errors import AddressError, InvalidFieldError
from farm.jobs.states import State

PEPPER = SecretStr("0123456789abcdef0123456789abcdef")


@pytest.fixture
def key(driver):
    return driver.run(create_key, driver.account, PEPPER, scopes=["videos:read", "videos:write"])


def authenticate(driver, key_text, *, pepper=PEPPER, client_ip=None):
    return driver.run(accounts.authenticate, key_text, pepper, client_ip=client_ip)


def test_a_key_opens_its_account_with_its_scopes(driver, key):
    principal = authenticate(driver, key.text)
    assert (principal.account_id, principal.key_id) == (driver.account, key.id8)
    assert principal.scopes == {"videos:read", "videos:write"}


def test_nothing_stored_gives_the_key_away(driver, key):
    (row,) = driver.sql("SELECT * FROM api_key")
    assert key.secret not in str(row)
    assert row.last4 == key.text[-4:]
    assert len(row.hash) == 32


@pytest.mark.usefixtures("key")
def test_a_well_formed_key_that_nobody_made_is_refused(driver):
    assert authenticate(driver, make_key("live").text) is None


@pytest.mark.usefixtures("key")
def test_the_id_of_one_key_with_the_secret_of_another_is_refused(driver):
    forged = make_key("live")
    driver.sql("UPDATE api_key SET id8 = :id8", id8=forged.id8)
    assert authenticate(driver, forged.text) is None


def test_a_key_of_another_environment_is_refused(driver):
    key = driver.run(create_key, driver.account, PEPPER, env="test")
    driver.sql("UPDATE api_key SET env = 'live'")
    assert authenticate(driver, key.text) is None


def test_another_pepper_opens_nothing(driver, key):
    assert authenticate(driver, key.text, pepper=SecretStr("another pepper, long enough......")) is None


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE api_key SET revoked_at = now()",
        "UPDATE api_key SET expires_at = now() - interval '1 second'",
        "UPDATE account SET status = 'suspended'",
    ],
)
def test_a_key_that_is_over_is_refused(driver, key, change):
    driver.sql(change)
    assert authenticate(driver, key.text) is None


def test_a_key_that_expires_later_still_opens(driver, key):
    driver.sql("UPDATE api_key SET expires_at = now() + interval '1 hour'")
    assert authenticate(driver, key.text) is not None


def test_revoking_works_once_and_only_for_the_owner(driver, key):
    assert not driver.run(revoke_key, driver.new_account(), key.id8)
    assert driver.run(revoke_key, driver.account, key.id8)
    assert not driver.run(revoke_key, driver.account, key.id8)
    assert authenticate(driver, key.text) is None


@pytest.mark.parametrize("client_ip", ["10.1.2.3", "fd00::7"])
def test_a_key_bound_to_networks_opens_from_inside(driver, client_ip):
    key = driver.run(create_key, driver.account, PEPPER, cidrs=["10.0.0.0/8", "fd00::/8"])
    assert authenticate(driver, key.text, client_ip=client_ip) is not None


@pytest.mark.parametrize("client_ip", ["11.0.0.1", "fe80::1", None, "not an address"])
def test_a_key_bound_to_networks_does_not_open_from_elsewhere(driver, client_ip):
    key = driver.run(create_key, driver.account, PEPPER, cidrs=["10.0.0.0/8"])
    with pytest.raises(AddressError) as refused:
        authenticate(driver, key.text, client_ip=client_ip)
    assert (refused.value.code, refused.value.http_status) == ("ip_not_allowed", 403)


@pytest.mark.parametrize("member", [{"scopes": ["videos:fly"]}, {"cidrs": ["10.0.0.0/40"]}])
def test_a_key_with_impossible_members_is_not_made(driver, member):
    with pytest.raises(InvalidFieldError, match=r"videos:fly|10\.0\.0\.0/40"):
        driver.run(create_key, driver.account, PEPPER, **member)
    assert driver.sql("SELECT id8 FROM api_key") == []


def test_the_last_use_is_noted_at_most_once_a_minute(driver, key):
    def last_used():
        return driver.sql("SELECT last_used_at FROM api_key")[0].last_used_at

    authenticate(driver, key.text)
    first = last_used()
    authenticate(driver, key.text)
    assert last_used() == first
    driver.sql("UPDATE api_key SET last_used_at = now() - interval '61 seconds'")
    authenticate(driver, key.text)
    assert last_used() > first


def test_the_use_of_a_key_never_waits_for_another_use(driver, key):
    with unit_of_work(driver.engine) as conn:
        conn.execute(text("SELECT 1 FROM api_key FOR UPDATE"))
        assert authenticate(driver, key.text) is not None


def test_an_account_is_made_once_and_keeps_its_limits(driver):
    first = driver.run(accounts.ensure_account, "acme", {"max_queued": 3})
    assert driver.run(accounts.ensure_account, "acme") == first
    assert driver.sql("SELECT limits FROM account WHERE name = 'acme'")[0].limits == {"max_queued": 3}
    driver.run(accounts.ensure_account, "acme", {"max_queued": 4})
    assert driver.sql("SELECT limits FROM account WHERE name = 'acme'")[0].limits == {"max_queued": 4}


def test_a_recount_of_right_counters_changes_nothing(driver):
    driver.reach(State.RUNNING)
    driver.submit()
    assert driver.run(accounts.recount, driver.account) is None
    assert driver.usage() == (1, 1)


def test_a_recount_mends_and_reports_wrong_counters(driver):
    driver.reach(State.RUNNING)
    driver.submit()
    driver.sql("UPDATE account_usage SET queued = 7, running = 0")
    assert driver.run(accounts.recount, driver.account) == Miscount(driver.account, (7, 0, 0), (1, 1, 0))
    assert driver.usage() == (1, 1)
