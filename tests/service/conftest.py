"""Real PostgreSQL, Valkey and SeaweedFS for the service tier, one set per test process, started on first use.

Every test gets a database of its own (a clone of one migrated template, about 25 ms), an empty broker and a
prefix of its own in the store. `farm_environment` is what a farm process started by a test needs;
`settings` is the same as an object. A missing server program fails the tests that need it.
"""

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import boto3
import psycopg
import pytest
import redis
import sqlalchemy
import structlog
from botocore.config import Config

from farm.db import schema
from farm.db.session import make_engine
from farm.embedded.ports import free_ports
from farm.embedded.postgres import PostgresServer
from farm.embedded.seaweed import REGION, SeaweedServer
from farm.embedded.servers import EmbeddedServers, ServerSecrets
from farm.embedded.valkey import ValkeyServer
from farm.settings import Settings, load_settings
from farm.storage import ObjectStore
from tests.server_folder import make_server_folder
from tests.state_guard import install_state_guard

ROOT = Path(__file__).parents[2]
BUCKET = "farm"
TEMPLATE = "template_farm"

# Roles set up their logs when they start. In a test, structlog's own way would draw every traceback with all
# variables of 60 frames, for seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


class S3Place(NamedTuple):
    """Where a test keeps its objects: a prefix of its own in the bucket of this test process."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    prefix: str
    region: str

    def client(self):
        """Return a plain boto3 client."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )


@pytest.fixture(scope="session")
def servers() -> Iterator[EmbeddedServers]:
    """Start the three servers of this test process."""
    directory = make_server_folder()
    running = EmbeddedServers(
        directory, os.environ, ServerSecrets.generate(), bucket=BUCKET, is_disposable=True
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(servers: EmbeddedServers) -> PostgresServer:
    assert servers.postgres is not None
    return servers.postgres


@pytest.fixture(scope="session")
def valkey(servers: EmbeddedServers) -> ValkeyServer:
    assert servers.valkey is not None
    return servers.valkey


@pytest.fixture(scope="session")
def seaweedfs(servers: EmbeddedServers) -> SeaweedServer:
    assert servers.seaweedfs is not None
    return servers.seaweedfs


@pytest.fixture(scope="session")
def postgres_admin(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    """Return the one connection that makes and drops the databases of this test process."""
    with psycopg.connect(postgres.url_of("postgres"), autocommit=True) as conn:
        yield conn


@pytest.fixture(scope="session")
def template_database(postgres: PostgresServer, postgres_admin: psycopg.Connection) -> str:
    """Make the database that all tests clone: the real migrations, and the guard of states."""
    postgres_admin.execute(f"CREATE DATABASE {TEMPLATE}")
    url = postgres.url_of(TEMPLATE).replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    schema.upgrade(engine)
    with engine.begin() as conn:
        install_state_guard(conn)
    return TEMPLATE


@pytest.fixture
def new_database(
    postgres: PostgresServer, postgres_admin: psycopg.Connection
) -> Iterator[Callable[[str], str]]:
    """Return a function that clones a database (`template1` for an empty one) and gives the clone's URL."""
    made: list[str] = []

    def clone(template: str) -> str:
        name = f"test_{uuid.uuid4().hex[:12]}"
        postgres_admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY WAL_LOG")
        made.append(name)
        return postgres.url_of(name)

    yield clone
    for name in made:
        postgres_admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(new_database: Callable[[str], str], template_database: str) -> str:
    """Make the test's own migrated database."""
    return new_database(template_database)


@pytest.fixture
def redis_url(valkey: ValkeyServer) -> str:
    """Empty the broker for the test."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def s3(seaweedfs: SeaweedServer) -> S3Place:
    """Give the test a place of its own in the object store."""
    return S3Place(
        seaweedfs.url,
        seaweedfs.access_key,
        seaweedfs.secret_key,
        seaweedfs.bucket,
        f"test-{uuid.uuid4().hex[:12]}",
        REGION,
    )


@pytest.fixture
def farm_environment(database_url: str, redis_url: str, s3: S3Place, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a farm process that uses this test's database, broker and store."""
    return {
        **os.environ,
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "S3_ENDPOINT_URL": s3.endpoint_url,
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "FARM_S3_BUCKET": s3.bucket,
        "FARM_S3_PREFIX": s3.prefix,
        "FARM_S3_REGION": s3.region,
        "FARM_API_PORT": str(free_ports(1)[0]),
        "FARM_STATE_DIR": str(tmp_path / "state"),
        "FARM_SECRET_KEY": secrets.token_urlsafe(32),
        "FARM_KEY_PEPPER": secrets.token_urlsafe(32),
        # Tests poll faster than users; those of the limits set their own.
        "FARM_RATE__REQUESTS_PER_MINUTE": "100000",
        "FARM_RATE__SUBMITS_PER_MINUTE": "100000",
    }


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Path]:
    """Return a function that has a folder made by the first test process that asks; all use the same."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent

    def get(name: str, make: Callable[[Path], object]) -> Path:
        target = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                unfinished = shared / f"{name}.unfinished"
                make(unfinished)
                unfinished.rename(target)
        return target

    return get


@pytest.fixture(scope="session")
def tiny_checkpoint(make_once: Callable[..., Path]) -> Path:
    """Make the tiny checkpoint by the command that users have."""

    def make(target: Path) -> None:
        subprocess.run([sys.executable, "-m", "magi2", "tiny-checkpoint", str(target)], cwd=ROOT, check=True)

    return make_once("tiny-checkpoint", make)


@pytest.fixture(scope="session")
def short_checkpoint(make_once: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """Make the same with two layers only: renders cost half."""

    def make(target: Path) -> None:
        # Imported here: it imports torch, which few of these tests need.
        from tests.short_checkpoint import shorten

        shorten(shutil.copytree(tiny_checkpoint, target))

    return make_once("short-checkpoint", make)


@pytest.fixture
def settings(farm_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the farm's settings for this test's parts."""
    for name, value in farm_environment.items():
        monkeypatch.setenv(name, value)
    return load_settings()


@pytest.fixture
def database(settings: Settings) -> Iterator[sqlalchemy.Engine]:
    """Return an engine on the test's own database."""
    engine = make_engine(settings, application="test")
    yield engine
    engine.dispose()


@pytest.fixture
def object_store(settings: Settings) -> ObjectStore:
    """Return the farm's client of the object store, below the test's own prefix."""
    return ObjectStore(settings)
