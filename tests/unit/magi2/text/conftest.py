"""A tiny text encoder on disk, shared by the tests of this folder, and copies of it that may be broken."""

import shutil
from pathlib import Path

import pytest
import torch

from magi2.checkpoint.tiny_text import write_text_encoder
from magi2.text.qwen35 import TextEncoder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "text_encoder"
    write_text_encoder(folder, width=64, seed=3)
    return folder


@pytest.fixture(scope="session")
def tower(text_folder: Path) -> TextEncoder:
    return TextEncoder.load(text_folder, torch.float32, "cpu")


@pytest.fixture
def own_folder(text_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(text_folder, tmp_path / "own"))
