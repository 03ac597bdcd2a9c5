"""The tiny checkpoint, written once, and copies of it that may be broken."""

import shutil
from pathlib import Path

import pytest

from magi2.checkpoint.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tiny_checkpoint(root)
    return root


@pytest.fixture
def own_root(tiny_root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_root, tmp_path / "own"))
