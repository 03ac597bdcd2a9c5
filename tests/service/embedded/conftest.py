"""Folders for the embedded servers: open ones, as most clones are, so that PostgreSQL's data stays inside."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def opened_directory() -> Iterator[Path]:
    """Make a folder that everybody may enter, which those of pytest are not, and remove it."""
    directory = Path(tempfile.mkdtemp(prefix="magi2-farm-tests-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    with opened_directory() as directory:
        yield directory
