"""Settings: where they come from, what is refused, and what is never shown."""

import secrets

import pytest

from farm.errors import SettingsError
from farm.jobs.job import DEFAULT_RULES
from farm.settings import describe, load_settings

SECRET = "3f9c1a7be2d84605b1c07d9e8a6f4321"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Give every test the least that a start needs, and no file of the project's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", "postgresql://farm:pw-of-db@db/farm")
    monkeypatch.setenv("REDIS_URL", "redis://:pw-of-redis@redis/0")
    return monkeypatch


def refused(match):
    return pytest.raises(SettingsError, match=match)


def test_the_least_configuration_gives_the_documented_defaults():
    settings = load_settings()
    assert settings.database_url == "postgresql+psycopg://farm:pw-of-db@db/farm"
    assert settings.rules() == DEFAULT_RULES
    assert (settings.worker.lease_s, settings.worker.heartbeat_s, settings.worker.drain_grace_s) == (
        30,
        5,
        1200,
    )
    assert (settings.quota.max_queued, settings.quota.max_running) == (100, 8)
    assert settings.limits.max_infra_losses == 5
    assert settings.auth == "keys"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_usual_spellings_of_the_database_url_are_taken(environment, scheme):
    environment.setenv("DATABASE_URL", f"{scheme}://farm@db/farm")
    assert load_settings().database_url == "postgresql+psycopg://farm@db/farm"


def test_another_database_is_refused_without_showing_the_url(environment):
    environment.setenv("DATABASE_URL", "mysql://farm:hunter2@db/farm")
    with refused("DATABASE_URL: must look like postgresql://") as failure:
        load_settings()
    assert "hunter2" not in str(failure.value)


def test_token_of_metrics_comes_from_its_file(environment, tmp_path):
    (tmp_path / "token").write_text("scrape-me\n")
    environment.setenv("FARM_METRICS__TOKEN_FILE", str(tmp_path / "token"))
    environment.setenv("FARM_METRICS__PORT", "9100")
    metrics = load_settings().metrics
    assert (metrics.token.get_secret_value(), metrics.port) == ("scrape-me", 9100)
    assert "scrape-me" not in str(describe(load_settings()))


def test_missing_addresses_are_named_all_at_once(environment):
    environment.delenv("DATABASE_URL")
    environment.delenv("REDIS_URL")
    with refused(r"DATABASE_URL is not set; REDIS_URL is not set; .*\./magi2-farm up"):
        load_settings()


def test_nested_names_and_lists_are_read(environment):
    environment.setenv("FARM_WORKER__DEVICES", "0, 1,3")
    environment.setenv("FARM_WEBHOOK__ALLOW_CIDRS", "127.0.0.0/8,::1/128")
    environment.setenv("FARM_LIMITS__MAX_INFRA_LOSSES", "1000")
    settings = load_settings()
    assert settings.worker.devices == [0, 1, 3]
    assert settings.webhook.allow_cidrs == ["127.0.0.0/8", "::1/128"]
    assert settings.rules().max_infra_losses == 1000


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("FARM_WORKER__LEASE", "FARM_WORKER__LEASE_S"),
        ("FARM_WORKER_PROFILE", "FARM_WORKER__PROFILE"),
        ("FARM_SECRETKEY", "FARM_SECRET_KEY"),
        ("FARM_DATABASE_URL", "DATABASE_URL"),
    ],
)
def test_an_unknown_name_stops_the_start_and_the_nearest_is_given(environment, name, nearest):
    environment.setenv(name, "1")
    with refused(rf"{name} .*the nearest one is {nearest}$"):
        load_settings()


def test_an_unknown_name_in_the_file_stops_the_start_too(tmp_path):
    (tmp_path / ".env").write_text("FARM_QUOTA__MAX_QUEUE=5\n")
    with refused(r"FARM_QUOTA__MAX_QUEUE \(.env\).*FARM_QUOTA__MAX_QUEUED"):
        load_settings()


def test_names_of_the_engine_and_of_others_are_none_of_our_business(environment):
    environment.setenv("MAGI2_CKPT_ROOT", "/models")
    environment.setenv("FARMING", "1")
    load_settings()


def test_the_environment_wins_over_the_file(environment, tmp_path):
    (tmp_path / ".env").write_text("FARM_API_PORT=9001\nFARM_S3_BUCKET=from-file\n")
    environment.setenv("FARM_API_PORT", "9002")
    settings = load_settings()
    assert (settings.api_port, settings.s3_bucket) == (9002, "from-file")


def test_overrides_win_over_everything(environment):
    environment.setenv("FARM_API_PORT", "9002")
    settings = load_settings(
        overrides={
            "FARM_API_PORT": "9003",
            "DATABASE_URL": "postgresql://other/farm",
            "FARM_LOG__LEVEL": "debug",
        }
    )
    assert (settings.api_port, settings.log.level) == (9003, "debug")
    assert settings.database_url == "postgresql+psycopg://other/farm"


def test_a_secret_may_come_from_a_file(environment, tmp_path):
    (tmp_path / "key").write_text(f"{SECRET}\n")
    environment.setenv("FARM_SECRET_KEY_FILE", str(tmp_path / "key"))
    assert load_settings().secret_key.get_secret_value() == SECRET


def test_an_address_may_come_from_a_file_too(environment, tmp_path):
    (tmp_path / "url").write_text("postgresql://from-file/farm\n")
    environment.delenv("DATABASE_URL")
    environment.setenv("DATABASE_URL_FILE", str(tmp_path / "url"))
    assert load_settings().database_url == "postgresql+psycopg://from-file/farm"


def test_a_secret_given_twice_is_refused(environment, tmp_path):
    environment.setenv("FARM_SECRET_KEY", SECRET)
    environment.setenv("FARM_SECRET_KEY_FILE", str(tmp_path / "key"))
    with refused("both set"):
        load_settings()


def test_a_secret_file_that_cannot_be_read_is_named(environment, tmp_path):
    environment.setenv("FARM_KEY_PEPPER_FILE", str(tmp_path / "absent"))
    with refused("FARM_KEY_PEPPER_FILE=.*absent cannot be read"):
        load_settings()


@pytest.mark.parametrize("weak", ["changeme", "x" * 64, "secretsecretsecretsecretsecretse"])
def test_a_weak_secret_is_refused_and_not_repeated(environment, weak):
    environment.setenv("FARM_KEY_PEPPER", weak)
    with refused("FARM_KEY_PEPPER: must be 32 random characters") as failure:
        load_settings()
    assert weak not in str(failure.value)


def test_a_role_says_which_secret_it_needs():
    with refused("FARM_SECRET_KEY and FARM_KEY_PEPPER"):
        load_settings().require("secret_key", "key_pepper")


def test_an_empty_value_counts_as_not_set(environment):
    for name in ("FARM_SECRET_KEY", "FARM_WORKER__PROFILE", "FARM_API_PORT", "S3_ENDPOINT_URL"):
        environment.setenv(name, "")
    settings = load_settings()
    origins = {line.name: line.origin for line in describe(settings)}
    assert origins["FARM_API_PORT"] == "default"
    assert (settings.secret_key, settings.worker.profile, settings.api_port) == (None, None, 8000)
    assert settings.s3_endpoint_url is None
    with refused("FARM_SECRET_KEY"):
        settings.require("secret_key")


def test_an_empty_secret_file_is_refused(environment, tmp_path):
    (tmp_path / "key").write_text("\n")
    environment.setenv("FARM_SECRET_KEY_FILE", str(tmp_path / "key"))
    with refused("FARM_SECRET_KEY: must be 32 random characters"):
        load_settings()


def test_a_role_with_its_secrets_goes_on(environment):
    environment.setenv("FARM_SECRET_KEY", secrets.token_hex(32))
    load_settings().require("secret_key")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_an_open_farm_is_allowed_on_loopback(environment, host):
    environment.setenv("FARM_AUTH", "none")
    environment.setenv("FARM_API_HOST", host)
    assert load_settings().auth == "none"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.5", "farm.example", "::"])
def test_an_open_farm_is_refused_elsewhere(environment, host):
    environment.setenv("FARM_AUTH", "none")
    environment.setenv("FARM_API_HOST", host)
    with refused("auth=none"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FARM_WORKER__LEASE_S", "10"),
        ("FARM_RETENTION__DEFAULT_DAYS", "91"),
        ("FARM_WEBHOOK__ALLOW_CIDRS", "10.0.0.0/40"),
        ("FARM_API_PORT", "0"),
        ("FARM_LOG__LEVEL", "loud"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(environment, name, value):
    environment.setenv(name, value)
    with refused(name.rsplit("__")[0]):
        load_settings()


def test_nothing_secret_is_shown(environment):
    environment.setenv("FARM_SECRET_KEY", SECRET)
    settings = load_settings()
    shown = repr(settings) + "".join(line.value for line in describe(settings))
    for secret in (SECRET, "pw-of-db", "pw-of-redis"):
        assert secret not in shown


def test_describe_names_each_setting_its_value_and_its_origin(environment, tmp_path):
    (tmp_path / ".env").write_text("FARM_S3_BUCKET=from-file\n")
    environment.setenv("FARM_QUOTA__MAX_RUNNING", "3")
    lines = {line.name: line for line in describe(load_settings())}
    assert (lines["FARM_QUOTA__MAX_RUNNING"].value, lines["FARM_QUOTA__MAX_RUNNING"].origin) == (
        "3",
        "environment",
    )
    assert (lines["FARM_S3_BUCKET"].value, lines["FARM_S3_BUCKET"].origin) == ("from-file", ".env")
    assert lines["FARM_API_HOST"].origin == "default"
