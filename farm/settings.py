"""Every setting of the farm, in one documented class; the only place that reads `FARM_*`.

Values come from the environment, then from `.env`; secrets also from the file that `NAME_FILE` names. Nested
groups are written with two underscores (`FARM_WORKER__LEASE_S`). A name that nobody knows stops the start,
and the message gives the nearest one that exists. `MAGI2_*` names belong to the engine and are not read here.
"""

import difflib
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from farm.errors import SettingsError
from farm.jobs.job import Rules

PREFIX = "FARM_"
MIN_SECRET_CHARS = 32
SHIPPED_PROFILES = Path(__file__).resolve().parent.parent / "profiles.yaml"
ENV_FILE = Path(".env")
# Masked by `config show`, and may come from a file.
_SECRETS = (
    "database_url",
    "redis_url",
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "secret_key",
    "key_pepper",
    "metrics.token",
)


def _split(value: object) -> object:
    """Read `a, b` as a list; a list stays as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LimitSettings(_Group):
    """Bounds that protect the farm from one job."""

    max_infra_losses: int = Field(default=5, ge=0, description="Lease losses that one job survives.")


class QuotaSettings(_Group):
    """What an account may have where its own row says nothing."""

    max_queued: int = Field(default=100, ge=1, description="Waiting jobs of one account.")
    max_running: int = Field(default=8, ge=1, description="Active jobs of one account.")
    gpu_seconds_per_day: int | None = Field(
        default=None, ge=1, description="GPU-seconds of one account and day (UTC); none: no limit."
    )


class RateSettings(_Group):
    """How often one may ask; bursts may use a whole minute's share at once."""

    requests_per_minute: int = Field(default=600, ge=1, description="Requests of one API key.")
    submits_per_minute: int = Field(default=60, ge=1, description="Videos that one account submits.")


class RetentionSettings(_Group):
    """How long results are kept."""

    default_days: int = Field(default=7, ge=1, description="Days that results are kept.")
    longest_days: int = Field(default=90, ge=1, description="Days that a request may ask for at most.")
    job_days: int = Field(default=90, ge=1, description="Days that a job is shown after its end.")
    event_days: int = Field(default=30, ge=1, description="Days that its timeline is kept after its end.")

    @model_validator(mode="after")
    def _in_order(self) -> "RetentionSettings":
        if self.default_days > self.longest_days:
            raise ValueError("default_days must not exceed longest_days")
        return self


class WebhookSettings(_Group):
    """What the webhook sender may call, and how long it waits."""

    allow_http: bool = Field(default=False, description="Allow plain http targets.")
    allow_cidrs: Annotated[list[str], NoDecode] = Field(default=[], description="Exempt from the guard.")
    timeout_s: float = Field(default=15.0, gt=0, le=60, description="Total time of one delivery.")

    _allow_cidrs = field_validator("allow_cidrs", mode="before")(_split)

    @field_validator("allow_cidrs")
    @classmethod
    def _are_networks(cls, value: list[str]) -> list[str]:
        for text in value:
            ipaddress.ip_network(text)
        return value


class WorkerSettings(_Group):
    """The agent of one group."""

    profile: str | None = Field(default=None, description="Profile that this worker serves.")
    devices: Annotated[list[int], NoDecode] = Field(default=[], description="Numbers, comma between.")
    lease_s: float = Field(default=30.0, ge=1, description="How long a claim lasts without a heartbeat.")
    heartbeat_s: float = Field(default=5.0, gt=0, description="Seconds between heartbeats.")
    drain_grace_s: float = Field(default=1200.0, ge=0, description="Time a drain gives to the current job.")
    stop_grace_s: float | None = Field(
        default=None, ge=0, description="The same where a signal drains; none: drain_grace_s."
    )
    measure: bool = Field(default=False, description="Sample the memory of host and devices; costs time.")
    price_per_gpu_hour: float | None = Field(
        default=None, ge=0, description="What the dashboard shows attempts to cost; none: no cost."
    )

    _devices = field_validator("devices", mode="before")(_split)

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> "WorkerSettings":
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError("lease_s must be at least three times heartbeat_s")
        return self


class SyncSettings(_Group):
    """Submits that wait for their clip."""

    timeout_s: int = Field(default=900, ge=1, le=86_400, description="Seconds that a sync submit waits.")


class MetricsSettings(_Group):
    """Who may read the numbers of the farm, and where ticker and worker offer theirs."""

    # FARM_METRICS__TOKEN_FILE is no member; names that nobody knows are refused before.
    model_config = ConfigDict(extra="ignore")

    token: SecretStr | None = Field(
        default=None, description="Bearer token of /metrics; none: this host alone."
    )
    host: str = Field(default="127.0.0.1", description="Address of the ticker's and the worker's /metrics.")
    port: int | None = Field(default=None, ge=1, le=65535, description="Their port; none: they offer none.")

    @model_validator(mode="after")
    def _open_only_with_a_token(self) -> "MetricsSettings":
        if self.port is not None and self.token is None and not _is_loopback(self.host):
            raise ValueError(f"host={self.host} would open the metrics to all; set FARM_METRICS__TOKEN too")
        return self


class AdminSettings(_Group):
    """The dashboard."""

    enabled: bool = Field(default=True, description="Serve /admin.")


class OtelSettings(_Group):
    """Traces."""

    endpoint: str | None = Field(default=None, description="Collector (OTLP over HTTP); none: no traces.")


class LogSettings(_Group):
    """What is logged and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class Settings(BaseSettings):
    """The whole configuration; frozen, and made by `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,  # compose hands on `${NAME:-}`
        extra="ignore",  # unknown names are refused by load_settings, with a better sentence
        frozen=True,
        populate_by_name=True,
    )

    database_url: str = Field(validation_alias="DATABASE_URL", repr=False, description="PostgreSQL.")
    redis_url: str = Field(validation_alias="REDIS_URL", repr=False, description="Redis or Valkey.")
    s3_endpoint_url: str | None = Field(
        default=None, validation_alias="S3_ENDPOINT_URL", description="Object store; absent: Amazon's."
    )
    aws_access_key_id: str | None = Field(default=None, validation_alias="AWS_ACCESS_KEY_ID", repr=False)
    aws_secret_access_key: SecretStr | None = Field(default=None, validation_alias="AWS_SECRET_ACCESS_KEY")
    aws_session_token: SecretStr | None = Field(default=None, validation_alias="AWS_SESSION_TOKEN")
    s3_public_endpoint_url: str | None = Field(default=None, description="What presigned URLs name.")
    s3_bucket: str = Field(default="farm", min_length=3)
    s3_prefix: str = Field(default="", description="Put before every object key.")
    s3_region: str = "us-east-1"
    s3_addressing: Literal["path", "virtual", "auto"] = "path"
    state_dir: Path = Field(default=Path("farm-state"), description="Logs, spool files, embedded servers.")
    public_base_url: str | None = Field(default=None, description="Where clients reach the api.")
    secret_key: SecretStr | None = Field(default=None, description="Encrypts webhook secrets at rest.")
    key_pepper: SecretStr | None = Field(default=None, description="Mixed into the hashes of API keys.")
    api_host: str = "127.0.0.1"
    api_port: int = Field(default=8000, ge=1, le=65535)
    api_docs: bool = Field(default=True, description="Serve /docs.")
    trusted_proxies: Annotated[list[str], NoDecode] = []
    cors_origins: Annotated[list[str], NoDecode] = []
    auth: Literal["keys", "none"] = Field(default="keys", description="`none` works on loopback only.")
    profiles_file: Path = Field(default=SHIPPED_PROFILES, description="The table of profiles.")
    limits: LimitSettings = LimitSettings()
    quota: QuotaSettings = QuotaSettings()
    rate: RateSettings = RateSettings()
    retention: RetentionSettings = RetentionSettings()
    webhook: WebhookSettings = WebhookSettings()
    worker: WorkerSettings = WorkerSettings()
    sync: SyncSettings = SyncSettings()
    log: LogSettings = LogSettings()
    admin: AdminSettings = AdminSettings()
    metrics: MetricsSettings = MetricsSettings()
    otel: OtelSettings = OtelSettings()

    _lists = field_validator("trusted_proxies", "cors_origins", mode="before")(_split)

    @field_validator("database_url")
    @classmethod
    def _with_driver(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if not separator or scheme not in {"postgresql", "postgres", "postgresql+psycopg"}:
            raise ValueError("must look like postgresql://user:password@host:5432/name")
        return f"postgresql+psycopg://{rest}"

    @field_validator("secret_key", "key_pepper")
    @classmethod
    def _is_secret(cls, value: SecretStr | None) -> SecretStr | None:
        text = None if value is None else value.get_secret_value()
        if text is not None and (len(text) < MIN_SECRET_CHARS or len(set(text)) < 10):
            raise ValueError(f"must be {MIN_SECRET_CHARS} random characters or more (openssl rand -hex 32)")
        return value

    @model_validator(mode="after")
    def _open_only_on_loopback(self) -> "Settings":
        if self.auth == "none" and not _is_loopback(self.api_host):
            raise ValueError(
                f"auth=none would open the farm to all on {self.api_host}; "
                "set FARM_API_HOST=127.0.0.1 or FARM_AUTH=keys"
            )
        return self

    @property
    def base_url(self) -> str:
        """Return the address that clients use, without a slash at the end."""
        return (self.public_base_url or f"http://{self.api_host}:{self.api_port}").rstrip("/")

    def rules(self) -> Rules:
        """Return the numbers that the job functions take."""
        return Rules(
            max_queued=self.quota.max_queued,
            max_running=self.quota.max_running,
            gpu_s_per_day=self.quota.gpu_seconds_per_day,
            max_infra_losses=self.limits.max_infra_losses,
            lease_s=self.worker.lease_s,
        )

    def require(self, *fields: str) -> None:
        """Refuse to go on while a setting that this role cannot do without is missing."""
        missing = [_env_names()[field] for field in fields if getattr(self, field) is None]
        if missing:
            raise SettingsError(f"this role needs {' and '.join(missing)}; set it, or its ..._FILE")


@dataclass(frozen=True)
class SettingLine:
    """One line of `config show`: a name, its effective value with secrets masked, and its origin."""

    name: str
    value: str
    origin: str


def load_settings(
    env_file: Path | None = ENV_FILE, *, overrides: Mapping[str, str] | None = None
) -> Settings:
    """Read the configuration of this process.

    Args:
        env_file: Read for names that the environment does not have.
        overrides: Variables that win over both, by their names: what embedded mode has started and drawn.

    Raises:
        SettingsError: An unknown name, a missing or a bad value; the message names the variable.
    """
    given = {name: found for name, found in _given(env_file).items() if found[0]}
    _refuse_unknown(given)
    try:
        values: dict[str, Any] = {
            "_env_file": env_file,
            **_secrets_from_files(given),
            **_nested(overrides or {}),
        }
        return Settings(**values)
    except ValidationError as exc:
        sentences = [_sentence(problem) for problem in exc.errors()]
        if any(problem["type"] == "missing" for problem in exc.errors()):
            sentences.append("set what is missing, or start the embedded farm with ./magi2-farm up")
        raise SettingsError("; ".join(sentences)) from None


def environment(env_file: Path | None = ENV_FILE) -> dict[str, str]:
    """Return the variables of this process and of `.env`: what child processes are started with."""
    return {name: value for name, (value, _) in _given(env_file).items()}


def describe(
    settings: Settings, env_file: Path | None = ENV_FILE, *, overrides: Mapping[str, str] | None = None
) -> list[SettingLine]:
    """List every setting with its effective value and where it came from; `overrides` as for loading them."""
    given = {name: found for name, found in _given(env_file).items() if found[0]}
    given |= {name: (value, "embedded farm") for name, value in (overrides or {}).items()}
    lines = []
    for path, name in sorted(_env_names().items(), key=lambda item: item[1]):
        value: Any = settings
        for part in path.split("."):
            value = getattr(value, part)
        shown = "********" if path in _SECRETS and value is not None else str(value)
        origin = given.get(name, given.get(f"{name}_FILE", ("", "default")))[1]
        lines.append(SettingLine(name, shown, origin))
    return lines


def _given(env_file: Path | None) -> dict[str, tuple[str, str]]:
    """Return name -> (value, origin) of everything that is set; the environment wins over the file."""
    found = {}
    if env_file is not None and env_file.is_file():
        values = dotenv_values(env_file)
        found = {name: (value or "", str(env_file)) for name, value in values.items()}
    return found | {name: (value, "environment") for name, value in os.environ.items()}


def _nested(overrides: Mapping[str, str]) -> dict[str, Any]:
    paths = {name: path for path, name in _env_names().items()}
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        field, _, member = paths[name].partition(".")
        if member:
            values.setdefault(field, {})[member] = value
        else:
            values[field] = value
    return values


def _env_names() -> dict[str, str]:
    """Return the dotted path of every setting and the variable that sets it."""
    names: dict[str, str] = {}
    for field, info in Settings.model_fields.items():
        group = info.annotation
        if isinstance(group, type) and issubclass(group, _Group):
            for member in group.model_fields:
                names[f"{field}.{member}"] = f"{PREFIX}{field}__{member}".upper()
        else:
            alias = info.validation_alias
            names[field] = alias if isinstance(alias, str) else f"{PREFIX}{field}".upper()
    return names


def _refuse_unknown(given: Mapping[str, tuple[str, str]]) -> None:
    names = _env_names()
    known = {*names.values(), *(f"{names[field]}_FILE" for field in _SECRETS)}
    for name, (_, origin) in sorted(given.items()):
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise SettingsError(f"{name} ({origin}) is not a setting; the nearest one is {nearest}")


def _secrets_from_files(given: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in _SECRETS:
        name = _env_names()[field]
        if f"{name}_FILE" not in given:
            continue
        if name in given:
            raise SettingsError(f"{name} and {name}_FILE are both set; keep one")
        path = Path(given[f"{name}_FILE"][0])
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise SettingsError(f"{name}_FILE={path} cannot be read: {exc.strerror}") from None
        group, _, member = field.rpartition(".")
        found.update({group: {member: secret}} if group else {field: secret})
    return found


def _sentence(problem: Any) -> str:
    """Name the variable and what is wrong, without the value: it may be a secret."""
    names = _env_names()
    loc = [str(part) for part in problem["loc"]]
    name = names.get(".".join(loc[:2])) or names.get("".join(loc[:1]))
    if name is None:
        name = f"{PREFIX}{loc[0].upper()}__*" if loc and loc[0] in Settings.model_fields else "".join(loc[:1])
    if problem["type"] == "missing":
        return f"{name} is not set"
    return f"{name or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
