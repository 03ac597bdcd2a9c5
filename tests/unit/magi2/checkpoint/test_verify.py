"""The report on a checkpoint folder: every kind of damage is named, nothing sound is."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from magi2.checkpoint.verify import verify_checkpoint
from magi2.errors import CheckpointError
from magi2.vae.oobleck import AudioDecoder

FIRST = "preview/model-00001-of-00002.safetensors"
SECOND = "preview/model-00002-of-00002.safetensors"
AUDIO = "stable-audio-open-1.0/model.safetensors"
LINEAR = "block.layers.3.mlp.split_linear.weight"


def problems(root: Path) -> list[str]:
    return list(verify_checkpoint(root).problems)


def change(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def change_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    edit(index["weight_map"])
    path.write_text(json.dumps(index), encoding="utf-8")


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    return folder / str(index["weight_map"][name])


def test_sound_folder_has_no_problem(tiny_root: Path) -> None:
    report = verify_checkpoint(tiny_root)
    assert report.problems == ()
    assert report.num_files == 15
    assert 5e6 < report.num_bytes < 50e6


def test_folders_of_other_stages_are_left_alone(own_root: Path) -> None:
    (own_root / "refiner").mkdir()
    (own_root / "refiner/model.safetensors").write_bytes(b"not checked")
    assert problems(own_root) == []


def test_folder_that_is_not_there_is_one_problem(tmp_path: Path) -> None:
    assert len(problems(tmp_path / "absent")) == 1


def test_empty_folder_is_a_list_of_missing_files(tmp_path: Path) -> None:
    found = problems(tmp_path)
    assert len(found) == 10
    assert all(problem.endswith("is missing") for problem in found)


def test_missing_shard_is_one_problem(own_root: Path) -> None:
    (own_root / FIRST).unlink()
    assert problems(own_root) == [f"{FIRST} is missing"]


@pytest.mark.parametrize("num_bytes", [0, 4, 1000, -100])
def test_cut_shard_is_one_problem(own_root: Path, num_bytes: int) -> None:
    path = own_root / FIRST
    path.write_bytes(path.read_bytes()[:num_bytes])
    found = problems(own_root)
    assert len(found) == 1
    assert found[0].startswith(f"{FIRST} is cut short")


def test_missing_tensor_is_named(own_root: Path) -> None:
    change(own_root / SECOND, lambda tensors: tensors.pop(LINEAR))
    assert f"preview: {LINEAR} is missing" in problems(own_root)


def test_unexpected_tensor_is_named(own_root: Path) -> None:
    change(own_root / SECOND, lambda tensors: tensors.update(stray=torch.zeros(1)))
    assert problems(own_root) == [f"preview: stray is not expected (in {SECOND})"]


def test_misshapen_tensor_is_named_with_both_shapes(own_root: Path) -> None:
    change(own_root / SECOND, lambda tensors: tensors.update({LINEAR: tensors[LINEAR][:3].clone()}))
    (found,) = problems(own_root)
    assert found.startswith(f"preview: {LINEAR} has shape [3, 64], expected [64, 64]")


def test_tensor_of_integers_is_named(own_root: Path) -> None:
    change(own_root / SECOND, lambda tensors: tensors.update({LINEAR: tensors[LINEAR].int()}))
    (found,) = problems(own_root)
    assert found.startswith(f"preview: {LINEAR} has dtype I32")


def test_other_floating_dtype_is_no_problem(own_root: Path) -> None:
    change(own_root / SECOND, lambda tensors: tensors.update({LINEAR: tensors[LINEAR].float()}))
    assert problems(own_root) == []


def test_unreadable_index_is_named(own_root: Path) -> None:
    (own_root / "preview/model.safetensors.index.json").write_text("{", encoding="utf-8")
    assert any("preview/model.safetensors.index.json" in problem for problem in problems(own_root))


def test_model_configuration_that_cannot_be_read_is_named(own_root: Path) -> None:
    (own_root / "preview/config.json").write_text("{}", encoding="utf-8")
    (found,) = problems(own_root)
    assert found.startswith("preview/config.json")


def test_text_tensor_outside_the_closed_list_is_named(own_root: Path) -> None:
    shard = sorted((own_root / "text_encoder").glob("*.safetensors"))[0]
    name = "model.language_model.layers.0.extra.weight"
    change(shard, lambda tensors: tensors.update({name: torch.zeros(1)}))
    assert problems(own_root) == [f"text_encoder: {name} is not expected (in text_encoder/{shard.name})"]


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.language_model.norm.weight",
        "model.language_model.layers.7.input_layernorm.weight",
    ],
)
def test_text_tensor_that_is_not_needed_may_be_absent(own_root: Path, name: str) -> None:
    folder = own_root / "text_encoder"
    change(shard_of(folder, name), lambda tensors: tensors.pop(name))
    change_index(folder, lambda weight_map: weight_map.pop(name))
    assert problems(own_root) == []


def test_text_tensor_that_is_needed_is_named(own_root: Path) -> None:
    name = "model.language_model.layers.5.input_layernorm.weight"
    folder = own_root / "text_encoder"
    change(shard_of(folder, name), lambda tensors: tensors.pop(name))
    change_index(folder, lambda weight_map: weight_map.pop(name))
    assert problems(own_root) == [f"text_encoder: {name} is missing"]


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_text_model_saved_alone_is_accepted(own_root: Path, prefix: str) -> None:
    folder = own_root / "text_encoder"
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    own = "model.language_model."
    renamed = {prefix + n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert problems(own_root) == []


def test_text_width_must_be_what_the_transformer_reads(own_root: Path) -> None:
    path = own_root / "preview/config.json"
    config = json.loads(path.read_text("utf-8"))
    config["arch_config"]["text_in_channels"] = 96
    path.write_text(json.dumps(config), encoding="utf-8")
    assert any(problem.endswith("text features of width 96") for problem in problems(own_root))


def test_damaged_tokenizer_is_named(own_root: Path) -> None:
    (own_root / "text_encoder/tokenizer.json").write_text("{}", encoding="utf-8")
    assert any("tokenizer" in problem for problem in problems(own_root))


def test_unsafe_pickle_is_named_with_its_global_and_not_run(own_root: Path) -> None:
    torch.save({"a": argparse.Namespace(x=1)}, own_root / "vae/Wan2.2_VAE.pth")
    (found,) = problems(own_root)
    assert found.startswith("vae/Wan2.2_VAE.pth")
    assert "argparse.Namespace" in found


def test_cut_pickle_is_named(own_root: Path) -> None:
    path = own_root / "turbo_vae/checkpoint.ckpt"
    path.write_bytes(path.read_bytes()[:-5000])
    (found,) = problems(own_root)
    assert found.startswith("turbo_vae/checkpoint.ckpt")


def test_value_that_is_not_finite_is_named(own_root: Path) -> None:
    name = "pretransform.model.decoder.layers.0.bias"
    change(own_root / AUDIO, lambda tensors: tensors[name].fill_(float("nan")))
    (found,) = problems(own_root)
    assert found.startswith(f"{AUDIO}: tensor {name}")


def test_everything_is_reported_at_once(own_root: Path) -> None:
    (own_root / FIRST).unlink()
    change(own_root / SECOND, lambda tensors: tensors.update(stray=torch.zeros(1)))
    (own_root / "text_encoder/tokenizer.json").unlink()
    (own_root / "turbo_vae/checkpoint.ckpt").unlink()
    torch.save({"a": argparse.Namespace(x=1)}, own_root / "vae/Wan2.2_VAE.pth")
    assert len(problems(own_root)) == 5


def test_verdict_is_the_loaders(own_root: Path) -> None:
    change(own_root / AUDIO, lambda tensors: tensors.pop("pretransform.model.decoder.layers.0.bias"))
    with pytest.raises(CheckpointError) as refused:
        AudioDecoder.load(own_root / "stable-audio-open-1.0")
    assert problems(own_root) == [f"stable-audio-open-1.0/{problem}" for problem in refused.value.problems]
