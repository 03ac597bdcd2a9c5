"""Folders for the embedded servers: open ones, as most clones are, so that PostgreSQL's data stays inside."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farm.embedded.postgres import shelter_of
from tests.server_folder import make_server_folder


@contextmanager
def opened_directory() -> Iterator[Path]:
    """Make a folder that everybody may enter, which those of pytest are not, and remove it."""
    directory = make_server_folder()
    try:
        yield directory
    finally:
        # Where the programs themselves lie in a closed folder, the data went elsewhere all the same.
        shutil.rmtree(shelter_of(directory / "state" / "postgres"), ignore_errors=True)
        shutil.rmtree(directory)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    with opened_directory() as directory:
        yield directory
