"""The tiny checkpoint with two of its five layers, for tests of what surrounds the model.

At the real number of tokens nearly all of a render is attention, so that a step costs 40 % of the tiny
model's. Both kinds of layers are there, and every axis divides by four as before. Tests of the model's own
numbers, and the demo that users run, keep the tiny checkpoint.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from magi2.checkpoint.index import PREVIEW, write_model_config
from magi2.checkpoint.tiny import DEFAULT_SEED, write_tiny_checkpoint, write_transformer
from magi2.config import ModelConfig

_TINY = ModelConfig.tiny()
# A layer with weights for each modality, then one with experts.
CONFIG = replace(_TINY, num_layers=2, mm_layers=(0,), moe=replace(_TINY.moe, layers=(1,)))


def write_short_checkpoint(directory: Path) -> None:
    """Write a whole checkpoint folder."""
    write_tiny_checkpoint(directory)
    shorten(directory)


def shorten(directory: Path) -> None:
    """Put the short transformer in the place of the one that a folder has."""
    shutil.rmtree(directory / PREVIEW)
    write_model_config(directory, CONFIG)
    write_transformer(directory / PREVIEW, CONFIG, seed=DEFAULT_SEED)
