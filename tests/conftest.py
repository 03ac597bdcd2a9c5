"""Hooks of every tier: a test's folder is its marker, long modules come first, golden sets may be others."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

# Before any test imports torch: its idle threads sleep instead of spinning (`magi2.config.wait_passively`).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine is no failure: generated examples are never judged by their time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# The modules that take longest. While one process of `--dist worksteal` is busy with them, the others take
# over its other tests, the last ones first: no long test begins when all others are done, and mostly one of
# the tests that start several processes runs at a time. First come those whose tests share what they start:
# it would be started twice where another process took some of them.
LONG = (
    "multiprocess/test_layouts.py",
    "multiprocess/test_offload.py",
    "service/embedded/test_supervisor.py",
    "service/test_parallel_job.py",
    "service/test_main_job.py",
    "chaos/test_storm.py",
    "multiprocess/test_qualify_4gpu.py",
    "multiprocess/test_worker_group.py",
    "multiprocess/test_wave_group.py",
    "unit/magi2/commands/test_documented.py",
    "service/test_compose.py",
    "multiprocess/test_torchrun.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        default=str(TESTS / "golden"),
        help="folder that holds the golden sets dit/, vae/ and pipeline/ (default: tests/golden)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        item.add_marker(getattr(pytest.mark, tier))
    assert not [name for name in LONG if not (TESTS / name).is_file()]
    rank = {TESTS / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))  # stable: pytest-randomly has shuffled before
