"""Fixtures of the chaos tier: those of the worker's service tests, on the same real servers."""

import pytest

from tests.service.conftest import (
    database,
    database_url,
    new_database,
    object_store,
    postgres,
    postgres_admin,
    redis_url,
    s3,
    seaweedfs,
    servers,
    settings,
    template_database,
    valkey,
)
from tests.service.conftest import farm_environment as plain_environment
from tests.service.worker.conftest import bench, start_worker
from tests.service.worker.harness import OF_WORKERS

__all__ = [
    "bench",
    "database",
    "database_url",
    "new_database",
    "object_store",
    "plain_environment",
    "postgres",
    "postgres_admin",
    "redis_url",
    "s3",
    "seaweedfs",
    "servers",
    "settings",
    "start_worker",
    "template_database",
    "valkey",
]


@pytest.fixture
def farm_environment(plain_environment: dict[str, str]) -> dict[str, str]:
    """Let leases be short, and ranks load the engines of the tests."""
    return plain_environment | OF_WORKERS
