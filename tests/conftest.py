"""Hooks of every tier: the folder of a test is its marker, and a golden run may be pointed at another folder."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


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
