"""Which tensors a model needs, and what is wrong with those that a checkpoint holds.

Promises: names, shapes and dtypes come from the modules themselves, built without memory; every difference is
reported by name. Extra tensors are differences too, but for a closed list in the text encoder's files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from magi2.checkpoint.index import TensorEntry
from magi2.config import ModelConfig
from magi2.model.transformer import Magi2Transformer

# Parts of the released text encoder that the first N - 2 layers without the final norm do not need.
_IGNORED_TEXT = ("model.visual.", "lm_head.", "mtp.", "model.language_model.norm.")
_TEXT_LAYER = re.compile(r"model\.language_model\.layers\.(\d+)\.")
_NUM_UNUSED_TEXT_LAYERS = 2
_FLOAT = re.compile(r"B?F\d+.*")


@dataclass(frozen=True)
class Expected:
    """Shape and dtype of a tensor that a model needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def build_on_meta(config: ModelConfig, *, flash_attn_version: int | None = None) -> Magi2Transformer:
    """Build the transformer without memory for its weights."""
    with torch.device("meta"):
        return Magi2Transformer(config, flash_attn_version=flash_attn_version)


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """List the tensors of the transformer, buffers included, in the order of its modules."""
    return needs_of(build_on_meta(config))


def needs_of(model: nn.Module) -> dict[str, Expected]:
    """List the tensors of a module's state."""
    return {name: Expected(tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}


def compare(expected: Mapping[str, Expected], found: Mapping[str, TensorEntry]) -> list[str]:
    """Return a sentence for each tensor that is missing, not expected, misshapen or not floating."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, entry in found.items():
        need = expected.get(name)
        if need is None:
            problems.append(f"{name} is not expected (in {entry.path})")
        elif need.shape != entry.shape:
            problems.append(
                f"{name} has shape {list(entry.shape)}, expected {list(need.shape)} (in {entry.path})"
            )
        elif not _FLOAT.fullmatch(entry.dtype):
            problems.append(f"{name} has dtype {entry.dtype}, expected a floating one (in {entry.path})")
    return problems


def is_ignored_text_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor in the text encoder's files is one that the engine leaves aside.

    Args:
        name: As the file spells it.
        num_layers: Of the whole text model, as its configuration states.
    """
    layer = _TEXT_LAYER.match(name)
    if layer is not None:
        return num_layers - _NUM_UNUSED_TEXT_LAYERS <= int(layer.group(1)) < num_layers
    return name.startswith(_IGNORED_TEXT)
