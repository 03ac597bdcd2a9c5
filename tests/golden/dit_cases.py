"""Golden sets of the transformer: a model and its cases, and stored arrays as what our model takes.

A set is a folder at any depth with one `*_config.json` and one `*_weights.safetensors`; its cases lie
beside them. Everything is read from the files: sizes, layers, which keys exist.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from magi2.checkpoint.index import scan_files
from magi2.checkpoint.keys import build_on_meta
from magi2.checkpoint.load import fill
from magi2.config import ModelConfig
from magi2.model.tokens import Tokens, cut
from magi2.model.transformer import Magi2Transformer
from magi2.packing import AUDIO, TEXT, VIDEO, Kind, PackedBatch, Part, Run, merge_runs

# A time marker counts as text on entry.
TIME_MARKER = 3
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """One stored file of a set."""

    path: Path
    tensors: dict[str, Tensor]
    notes: dict[str, str]

    def of(self, precision: str) -> dict[str, Tensor]:
        """Return the tensors of one precision, without its prefix."""
        prefix = f"{precision}."
        return {k.removeprefix(prefix): t for k, t in self.tensors.items() if k.startswith(prefix)}


def read_case(path: Path) -> Case:
    with safe_open(path, framework="pt") as file:
        return Case(path, load_file(path), file.metadata() or {})


def read_config(folder: Path) -> ModelConfig:
    [path] = folder.glob("*_config.json")
    content = json.loads(path.read_text())
    return ModelConfig.from_arch_config(content["arch_config"], time_channel_dim=content["time_channel_dim"])


@lru_cache(maxsize=4)
def load_model(folder: Path, precision: str) -> Magi2Transformer:
    """Load a set's weights by the product's loader."""
    [path] = folder.glob("*_weights.safetensors")
    model = build_on_meta(read_config(folder).with_dtype(DTYPES[precision]))
    return fill(model, scan_files([path]))


def modality_runs(modality: Tensor, bounds: list[int] | None = None) -> list[Run]:
    """Cut packed rows into runs of one modality, inside segments where their bounds are given."""
    ids = torch.where(modality == TIME_MARKER, TEXT, modality).tolist()
    runs = []
    for first, last in pairwise(bounds or [0, len(ids)]):
        start = first
        for value, group in groupby(ids[first:last]):
            stop = start + len(list(group))
            runs.append(Run(start, stop, value))
            start = stop
    return runs


def tokens_of(case: Case, model: Magi2Transformer) -> Tokens:
    """Return the packed sequence of a module case; `rope` and `cu_seqlens` where the file has them."""
    modality = case.tensors["modality_mapping"]
    length = modality.shape[0]
    bounds = case.tensors["cu_seqlens"].tolist() if "cu_seqlens" in case.tensors else [0, length]
    rope = case.tensors.get("rope", torch.zeros(length, 0))
    runs = merge_runs(modality_runs(modality))
    return Tokens(tuple(cut(runs, model.config.stream_width, rope.device)), tuple(bounds), rope)


def batch_of(case: Case, config: ModelConfig) -> PackedBatch:
    """Turn the stored dense matrix of a full case into a packed batch."""
    x, modality = case.tensors["in.x"], case.tensors["in.modality_mapping"]
    bounds = case.tensors["in.cu_seqlens"].tolist()
    used = [0, 0, 0]
    parts: list[Part] = []
    for segment, (first, last) in enumerate(pairwise(bounds)):
        seen: set[int] = set()
        for start, stop, kind in modality_runs(modality[first:last]):
            parts.append(Part(_kind(kind, seen), segment, first + start, stop - start, used[kind]))
            used[kind] += stop - start
            seen.add(kind)
        parts = _as_padding(parts, segment, seen)
    ids = torch.where(modality == TIME_MARKER, TEXT, modality)
    widths = (config.video_in_channels, config.audio_in_channels, config.text_in_channels)
    video, audio, text = (x[ids == m][:, :width] for m, width in enumerate(widths))
    return PackedBatch(
        parts=tuple(parts),
        segment_lengths=tuple(b - a for a, b in pairwise(bounds)),
        grid=(1, 1, 1),
        video=video,
        audio=audio,
        text=text,
        coords=case.tensors["in.coords_mapping"],
        modality=modality,
        cu_seqlens=case.tensors["in.cu_seqlens"],
    )


def _kind(modality: int, seen: set[int]) -> Kind:
    """The first run of video is the clip's; later ones are reference images."""
    if modality == VIDEO:
        return Kind.REFERENCE if VIDEO in seen else Kind.VIDEO
    return Kind.AUDIO if modality == AUDIO else Kind.TEXT


def _as_padding(parts: list[Part], segment: int, seen: set[int]) -> list[Part]:
    """A segment of nothing but text rows is padding."""
    if seen != {TEXT}:
        return parts
    return [replace(p, kind=Kind.PADDING) if p.segment == segment else p for p in parts]
