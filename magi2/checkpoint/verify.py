"""One report of everything that is wrong with a checkpoint folder, without a GPU.

Promises: all problems at once, each naming its file; the same verdict as loading, because the three auxiliary
networks go through their own loaders and the two large models are compared by the lists that loading uses.
Of the large models only headers are read, so 274 GB take seconds. Folders that the engine does not know are
left alone; tensors that it does not know are problems, but for the closed lists. It judges no values, except
that those of the auxiliary networks must be finite.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from magi2.checkpoint import index
from magi2.checkpoint.index import Contents
from magi2.checkpoint.keys import Expected, compare, expected_tensors, is_ignored_text_tensor, needs_of
from magi2.config import ModelConfig
from magi2.errors import CheckpointError
from magi2.text.qwen35 import NUM_UNUSED_LAYERS
from magi2.text.tokenizer import PromptTokenizer
from magi2.vae.oobleck import AudioDecoder
from magi2.vae.turbo import TurboDecoder
from magi2.vae.wan22 import ImageEncoder

IMAGE_VAE = "vae/Wan2.2_VAE.pth"
TURBO_VAE = "turbo_vae"
AUDIO_DECODER = "stable-audio-open-1.0"

# The published text model's naming, and those of its parts when saved alone; the loader takes all of them.
_TEXT_NAMING = "model.language_model."
_TEXT_PREFIXES = (_TEXT_NAMING, "language_model.", "model.", "")
_TEXT_PARTS = ("layers.", "embed_tokens.", "norm.")


@dataclass(frozen=True)
class Report:
    """What was checked, and every problem: none means that the engine will load the folder."""

    problems: tuple[str, ...]
    num_files: int
    num_bytes: int


def verify_checkpoint(root: Path) -> Report:
    """Check a checkpoint folder and return everything that is wrong with it."""
    if not root.is_dir():
        text = f"{root} is no folder; name the one that holds preview/, text_encoder/, vae/ and the others"
        return Report((text,), 0, 0)
    missing = index.missing_files(root)
    problems = [f"{name} is missing" for name in missing]
    problems += _transformer(root)
    problems += _text_encoder(root, missing)
    problems += _auxiliary(root, missing)
    files = [root / name for name in index.REQUIRED_FILES if name not in missing]
    files += [path for folder in index.SHARDED_FOLDERS for path in (root / folder).glob("*.safetensors")]
    # Messages name files inside the folder; two checks may find the same.
    named = dict.fromkeys(problem.replace(f"{root}/", "") for problem in problems)
    return Report(tuple(named), len(files), sum(path.stat().st_size for path in files))


def _transformer(root: Path) -> list[str]:
    try:
        config = index.read_model_config(root)
    except CheckpointError as error:
        return error.problems
    return list(_differences(root / index.PREVIEW, expected_tensors(config)))


def _text_encoder(root: Path, missing: list[str]) -> list[str]:
    folder = root / index.TEXT_ENCODER
    problems: list[str] = []
    if not any(name.startswith(f"{index.TEXT_ENCODER}/tokenizer") for name in missing):
        problems += _problems_of(lambda: PromptTokenizer.load(folder))
    if f"{index.TEXT_ENCODER}/config.json" in missing:
        return problems
    try:
        expected, num_layers, width = _expected_text(folder)
    except CheckpointError as error:
        return [*problems, *error.problems]
    problems += _text_width(root, width)
    return [*problems, *_differences(folder, expected, num_text_layers=num_layers)]


def _auxiliary(root: Path, missing: list[str]) -> Iterator[str]:
    """Load each auxiliary network and let it go again: about 1 GB is read, one network after the other."""
    loaders: dict[str, Callable[[], object]] = {
        IMAGE_VAE: lambda: ImageEncoder.load(root / IMAGE_VAE),
        TURBO_VAE: lambda: TurboDecoder.load(root / TURBO_VAE),
        AUDIO_DECODER: lambda: AudioDecoder.load(root / AUDIO_DECODER),
    }
    for part, load in loaders.items():
        if not any(name.startswith(part) for name in missing):
            folder = part.split("/")[0]
            yield from (f"{folder}/{p.removeprefix(f'{folder}/')}" for p in _problems_of(load))


def _problems_of(load: Callable[[], object]) -> list[str]:
    try:
        load()
    except CheckpointError as error:
        return error.problems
    return []


def _differences(
    folder: Path, expected: dict[str, Expected], *, num_text_layers: int | None = None
) -> Iterator[str]:
    """Compare the headers of a model's files with what it needs."""
    contents = index.scan_folder(folder)
    if contents.tensors or (folder / index.INDEX_NAME).is_file():
        yield from contents.problems  # a folder without any file is among the missing ones
    if not contents.tensors:
        return
    found = contents.tensors
    unseen = _tensors_of_unreadable_files(folder, contents)
    if num_text_layers is not None:
        found = {_text_name(name): entry for name, entry in found.items()}
        found = {n: e for n, e in found.items() if not is_ignored_text_tensor(n, num_text_layers)}
        unseen = {_text_name(name) for name in unseen}
    needed = {name: need for name, need in expected.items() if name not in unseen}
    yield from (f"{folder.name}: {problem}" for problem in compare(needed, found))


def _tensors_of_unreadable_files(folder: Path, contents: Contents) -> set[str]:
    """Return what the index places in files that cannot be read: each file is one problem, not hundreds."""
    try:
        weight_map: dict[str, Any] = json.loads((folder / index.INDEX_NAME).read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError):
        return set()
    readable = {entry.path.name for entry in contents.tensors.values()}
    return {name for name, shard in weight_map.items() if shard not in readable}


def _text_name(name: str) -> str:
    """Spell a text model's tensor as the published checkpoint does."""
    for prefix in _TEXT_PREFIXES:
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and rest.startswith(_TEXT_PARTS):
            return _TEXT_NAMING + rest
    return name


def _expected_text(folder: Path) -> tuple[dict[str, Expected], int, int]:
    """Return what the engine needs of the text model, its number of layers and its width."""
    # Imported here: transformers takes seconds, and only the text tower needs it.
    from transformers import AutoConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    make_model: Callable[[Any], torch.nn.Module] = Qwen3_5TextModel
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        num_layers = config.num_hidden_layers
        config.num_hidden_layers = num_layers - NUM_UNUSED_LAYERS
        config.layer_types = config.layer_types[: config.num_hidden_layers]
        with torch.device("meta"):
            needed = needs_of(make_model(config))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}/config.json describes no Qwen3.5 text model: {error}") from error
    expected = {_TEXT_NAMING + name: need for name, need in needed.items() if not name.startswith("norm.")}
    return expected, num_layers, config.hidden_size


def _text_width(root: Path, width: int) -> list[str]:
    try:
        model: ModelConfig = index.read_model_config(root)
    except CheckpointError:
        return []  # reported with the transformer
    if width == model.text_in_channels:
        return []
    text = f"text_encoder/config.json: hidden_size is {width}, but the transformer reads text features"
    return [f"{text} of width {model.text_in_channels}"]
