"""Hooks of every tier: the folder of a test is its marker, and a golden run may use another folder."""

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
