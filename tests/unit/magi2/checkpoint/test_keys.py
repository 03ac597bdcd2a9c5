"""Names, shapes and dtypes of the released model, and the wording of differences."""

import json
from pathlib import Path

import pytest
import torch

from magi2.checkpoint.index import TensorEntry
from magi2.checkpoint.keys import Expected, compare, expected_tensors, is_ignored_text_tensor
from magi2.config import ModelConfig

INVENTORY = Path(__file__).parents[3] / "data" / "checkpoint_inventory.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def test_released_model_has_exactly_the_tensors_of_the_inventory() -> None:
    stored = json.loads(INVENTORY.read_text())
    want = {name: Expected(tuple(shape), DTYPES[dtype]) for name, (dtype, shape) in stored.items()}
    assert len(want) == 1371
    assert expected_tensors(ModelConfig.released()) == want


def test_released_model_weighs_what_it_should() -> None:
    sizes = [
        torch.Size(need.shape).numel() * need.dtype.itemsize
        for need in expected_tensors(ModelConfig.released()).values()
    ]
    assert sum(sizes) == 228_107_858_176


def test_float32_mode_changes_dtypes_only() -> None:
    released = expected_tensors(ModelConfig.tiny())
    strict = expected_tensors(ModelConfig.tiny().with_dtype("float32"))
    assert {n: e.shape for n, e in strict.items()} == {n: e.shape for n, e in released.items()}
    assert {e.dtype for e in strict.values()} == {torch.float32}


def entry(*shape: int, dtype: str = "F32") -> TensorEntry:
    return TensorEntry(Path("shard"), dtype, shape)


def test_every_difference_is_named_once() -> None:
    expected = {name: Expected((2, 3), torch.float32) for name in ("good", "lost", "bent", "whole", "cast")}
    found = {
        "good": entry(2, 3),
        "bent": entry(3, 2),
        "whole": entry(2, 3, dtype="I64"),
        "cast": entry(2, 3, dtype="BF16"),
        "extra": entry(1),
    }
    assert compare(expected, found) == [
        "lost is missing",
        "bent has shape [3, 2], expected [2, 3] (in shard)",
        "whole has dtype I64, expected a floating one (in shard)",
        "extra is not expected (in shard)",
    ]


@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", True),
        ("lm_head.weight", True),
        ("mtp.fc.weight", True),
        ("model.language_model.norm.weight", True),
        ("model.language_model.layers.62.mlp.up_proj.weight", True),
        ("model.language_model.layers.63.mlp.up_proj.weight", True),
        ("model.language_model.layers.61.mlp.up_proj.weight", False),
        ("model.language_model.layers.64.mlp.up_proj.weight", False),
        ("model.language_model.embed_tokens.weight", False),
        ("model.visualizer.weight", False),
        ("extra.weight", False),
    ],
)
def test_text_tensors_left_aside_are_a_closed_list(name: str, *, is_ignored: bool) -> None:
    assert is_ignored_text_tensor(name, 64) is is_ignored
