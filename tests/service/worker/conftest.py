"""Fixtures of the worker's tests: short leases, a bench on the test's database, agents that always end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from farm.settings import Settings
from tests.service.worker.harness import OF_WORKERS, AgentThread, Bench, WorkerProcess


@pytest.fixture
def farm_environment(farm_environment: dict[str, str]) -> dict[str, str]:
    """Let leases be short, and ranks load the engines of the tests."""
    return farm_environment | OF_WORKERS


@pytest.fixture
def bench(database: Engine, settings: Settings) -> Bench:
    return Bench(database, settings.rules())


@pytest.fixture
def start_agent(settings: Settings, farm_environment: dict[str, str]) -> Iterator[Callable[..., AgentThread]]:
    """Return a function that starts an agent in a thread and waits until its ranks are loaded."""
    started: list[AgentThread] = []

    def start(*, wait: bool = True, **overrides: Any) -> AgentThread:
        own = overrides.pop("settings", settings)
        agent = AgentThread(own, **{"environment": farm_environment, **overrides})
        started.append(agent)
        if wait:
            agent.wait_ready()
        return agent

    yield start
    for agent in started:
        agent.stop()


@pytest.fixture
def start_worker(farm_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Return a function that starts a worker process with a folder of its own."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, only: dict[str, str] | None = None, **environment: str) -> WorkerProcess:
        cwd = tmp_path / f"worker{len(started)}"
        base = farm_environment if only is None else only
        own = {**base, "FARM_STATE_DIR": str(cwd / "state"), **environment}
        worker = WorkerProcess(own, cwd, *arguments)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.stop()
