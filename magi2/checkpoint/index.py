"""The released folder layout, and which file holds which tensor.

Promises: only headers are read; every file that is missing, cut short or named wrongly is reported, not the
first. It knows no tensor names: what a file should hold is the business of `magi2.checkpoint.keys`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from magi2.config import ModelConfig
from magi2.errors import CheckpointError

PREVIEW = "preview"
TEXT_ENCODER = "text_encoder"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Written by us beside a model that is not the released one; the released folder has none.
CONFIG_NAME = "config.json"
# Everything the engine opens apart from the weights of the two sharded models.
REQUIRED_FILES = (
    f"{TEXT_ENCODER}/config.json",
    f"{TEXT_ENCODER}/tokenizer.json",
    f"{TEXT_ENCODER}/tokenizer_config.json",
    "vae/Wan2.2_VAE.pth",
    "turbo_vae/TurboV3-Wan22-TinyShallow_7_7.json",
    "turbo_vae/checkpoint.ckpt",
    "stable-audio-open-1.0/model_config.json",
    "stable-audio-open-1.0/model.safetensors",
)
SHARDED_FOLDERS = (PREVIEW, TEXT_ENCODER)


@dataclass(frozen=True)
class TensorEntry:
    """Where one stored tensor lies, its dtype as safetensors spells it, and its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Contents:
    """The tensors that readable files hold, and one sentence for everything that is wrong."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def missing_files(root: Path) -> list[str]:
    """List the files, shards included, that a checkpoint folder lacks; paths relative to it."""
    missing = [name for name in REQUIRED_FILES if not (root / name).is_file()]
    for folder in SHARDED_FOLDERS:
        if (root / folder / INDEX_NAME).is_file():
            shards = set(_read_weight_map(root / folder)[0].values())
            missing += [f"{folder}/{shard}" for shard in shards if not (root / folder / shard).is_file()]
        elif not (root / folder / SINGLE_NAME).is_file():
            missing.append(f"{folder}/{INDEX_NAME}")
    return sorted(missing)


def read_model_config(root: Path) -> ModelConfig:
    """Return the transformer's sizes: those stated in the checkpoint folder, else the released ones.

    Raises:
        CheckpointError: The stated sizes cannot be read or do not fit together.
    """
    path = root / PREVIEW / CONFIG_NAME
    if not path.is_file():
        return ModelConfig.released()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        width = content.get("time_channel_dim", ModelConfig.released().time_channel_dim)
        return ModelConfig.from_arch_config(content["arch_config"], time_channel_dim=width)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} does not describe a model of this engine: {error}") from error


def stored_bytes(folder: Path) -> int:
    """Return how many bytes of weights a model's folder holds."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_model_config(root: Path, config: ModelConfig) -> None:
    """State a model's sizes in a checkpoint folder."""
    content = {"arch_config": config.to_arch_config(), "time_channel_dim": config.time_channel_dim}
    path = root / PREVIEW / CONFIG_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def scan_folder(folder: Path) -> Contents:
    """Read the headers of one model's files: the shards of its index, or the single file."""
    if (folder / INDEX_NAME).is_file():
        weight_map, problems = _read_weight_map(folder)
        contents = scan_files(folder / shard for shard in sorted(set(weight_map.values())))
        problems += contents.problems
        readable = {entry.path for entry in contents.tensors.values()}
        for name, shard in sorted(weight_map.items()):
            if name not in contents.tensors and folder / shard in readable:
                problems.append(f"{folder / INDEX_NAME} places {name} in {shard}, which lacks it")
        return Contents(contents.tensors, problems)
    if (folder / SINGLE_NAME).is_file():
        return scan_files([folder / SINGLE_NAME])
    return Contents(problems=[f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}"])


def scan_files(paths: Iterable[Path]) -> Contents:
    """Read the headers of safetensors files."""
    contents = Contents()
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                _add_entries(contents, path, file)
        except FileNotFoundError:
            contents.problems.append(f"{path} is missing")
        except (SafetensorError, OSError) as error:
            contents.problems.append(f"{path} is cut short or not a safetensors file: {error}")
    return contents


def _add_entries(contents: Contents, path: Path, file: Any) -> None:
    for name in file.offset_keys():
        view = file.get_slice(name)
        entry = TensorEntry(path, view.get_dtype(), tuple(view.get_shape()))
        if name in contents.tensors:
            contents.problems.append(f"{name} lies in both {contents.tensors[name].path} and {path}")
        contents.tensors[name] = entry


def _read_weight_map(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return which shard holds which tensor, and what is wrong with the index; shards must lie beside it."""
    path = folder / INDEX_NAME
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        strays = sorted({str(shard) for shard in weight_map.values() if Path(shard).name != shard})
    except (ValueError, KeyError, TypeError) as error:
        return {}, [f"{path} is no index of tensors: {error}"]
    problems = [f"{path} names a shard outside its folder: {shard}" for shard in strays]
    return {name: shard for name, shard in weight_map.items() if shard not in strays}, problems
