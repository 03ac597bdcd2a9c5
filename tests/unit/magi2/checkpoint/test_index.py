"""Folder layout, shard indexes and headers: everything wrong is reported at once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from magi2.checkpoint import index
from magi2.config import ModelConfig
from magi2.errors import CheckpointError


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / index.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


TWO_SHARDS = {
    "a.safetensors": {"x": torch.zeros(2, 3), "y": torch.zeros(4, dtype=torch.bfloat16)},
    "b.safetensors": {"z": torch.zeros(1)},
}


def test_index_leads_to_every_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, TWO_SHARDS)
    contents = index.scan_folder(tmp_path)
    assert contents.problems == []
    assert contents.tensors == {
        "x": index.TensorEntry(tmp_path / "a.safetensors", "F32", (2, 3)),
        "y": index.TensorEntry(tmp_path / "a.safetensors", "BF16", (4,)),
        "z": index.TensorEntry(tmp_path / "b.safetensors", "F32", (1,)),
    }


def test_single_file_stands_for_the_index(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / index.SINGLE_NAME)
    assert list(index.scan_folder(tmp_path).tensors) == ["x"]


def test_folder_without_either_is_a_problem(tmp_path: Path) -> None:
    [problem] = index.scan_folder(tmp_path).problems
    assert index.INDEX_NAME in problem
    assert index.SINGLE_NAME in problem


def test_all_broken_shards_are_reported_together(tmp_path: Path) -> None:
    write_shards(tmp_path, TWO_SHARDS | {"c.safetensors": {"w": torch.zeros(3)}})
    (tmp_path / "a.safetensors").unlink()
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-2])
    contents = index.scan_folder(tmp_path)
    assert list(contents.tensors) == ["w"]
    text = "\n".join(contents.problems)
    assert f"{tmp_path / 'a.safetensors'} is missing" in text
    assert f"{tmp_path / 'b.safetensors'} is cut short" in text


def test_tensor_that_its_shard_lacks_is_a_problem(tmp_path: Path) -> None:
    write_shards(tmp_path, TWO_SHARDS)
    save_file({"other": torch.zeros(1)}, tmp_path / "b.safetensors")
    [problem] = index.scan_folder(tmp_path).problems
    assert "places z in b.safetensors" in problem


def test_tensor_in_two_shards_is_a_problem(tmp_path: Path) -> None:
    write_shards(tmp_path, TWO_SHARDS)
    save_file({"x": torch.zeros(2, 3), "z": torch.zeros(1)}, tmp_path / "b.safetensors")
    [problem] = index.scan_folder(tmp_path).problems
    assert problem.startswith("x lies in both")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', "{}"])
def test_unreadable_index_is_a_problem(tmp_path: Path, text: str) -> None:
    (tmp_path / index.INDEX_NAME).write_text(text)
    [problem] = index.scan_folder(tmp_path).problems
    assert "is no index of tensors" in problem


def test_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "preview"
    folder.mkdir()
    (folder / index.INDEX_NAME).write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    contents = index.scan_folder(folder)
    assert contents.tensors == {}
    assert "outside its folder" in contents.problems[0]


def test_missing_files_are_listed_together(tmp_path: Path) -> None:
    missing = index.missing_files(tmp_path)
    assert {*index.REQUIRED_FILES, f"preview/{index.INDEX_NAME}"} <= set(missing)
    for name in missing:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    write_shards(tmp_path / "preview", TWO_SHARDS)
    write_shards(tmp_path / "text_encoder", TWO_SHARDS)
    assert index.missing_files(tmp_path) == []
    (tmp_path / "preview" / "b.safetensors").unlink()
    assert index.missing_files(tmp_path) == ["preview/b.safetensors"]


def test_released_folder_states_no_sizes(tmp_path: Path) -> None:
    assert index.read_model_config(tmp_path) == ModelConfig.released()


def test_stated_sizes_are_read_back(tmp_path: Path) -> None:
    config = ModelConfig.tiny(text_in_channels=96)
    index.write_model_config(tmp_path, config)
    assert index.read_model_config(tmp_path) == config


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"arch_config": 3}', '{"arch_config": {"num_layers": 1}}'])
def test_unreadable_sizes_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / index.PREVIEW / index.CONFIG_NAME
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(CheckpointError, match="does not describe a model"):
        index.read_model_config(tmp_path)
