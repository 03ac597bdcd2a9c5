"""Packed batches against the reference's: rows, coordinates, modalities, bounds and time, exact.

Cases: every `packing_*.safetensors` (small, with tensors) and `packing_full*.json` (true sizes, as digests).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from magi2 import packing
from magi2.packing import Conditioning, PackedBatch, Reference
from tests import tolerances
from tests.golden.discovery import matching

SMALL = r"packing_.*\.safetensors"
FULL = r"packing_full.*\.json"
FILES = [SMALL, FULL]


@dataclass(frozen=True)
class Small:
    """One small case: its tensors and its notes."""

    tensors: dict[str, Tensor]
    notes: dict[str, str]


def golden_cases(golden_dir: Path) -> dict[str, list[Any]]:
    full = []
    for path in matching(golden_dir, "pipeline", FULL):
        content = json.loads(path.read_text())
        full += [pytest.param(case, id=name) for name, case in content.items() if not name.startswith("_")]
    return {
        "small_path": [pytest.param(p, id=p.stem) for p in matching(golden_dir, "pipeline", SMALL)],
        "full": full,
    }


def read(path: Path) -> Small:
    with safe_open(path, framework="pt") as file:
        return Small(load_file(path), file.metadata() or {})


def references(tensors: dict[str, Tensor]) -> tuple[Reference, ...]:
    if "ref_feat" not in tensors:
        return ()
    sizes = tensors["ref_len"][0].tolist()
    return tuple(
        Reference(tensors["ref_feat"][:, k, :, :, :height, :width], tensors["ref_special"][:, k : k + 1])
        for k, (height, width) in enumerate(sizes)
    )


def packed(case: Small) -> PackedBatch:
    tensors, notes = case.tensors, case.notes
    conditioning = Conditioning(
        text=(tensors["txt"], tensors["null_txt"]),
        references=references(tensors),
        use_reference_for_uncond=notes.get("use_ref_for_uncond", "True") == "True",
    )
    return packing.pack(
        tensors["latent"], tensors["audio_latent"], conditioning, align=int(notes.get("align", 1))
    )


def dense_rows(batch: PackedBatch) -> Tensor:
    """The reference's one matrix of features, zero on the right."""
    width = max(batch.rows(m).shape[1] for m in (packing.VIDEO, packing.AUDIO, packing.TEXT))
    x = torch.zeros(batch.num_tokens, width)
    for part in batch.parts:
        rows = batch.rows(part.kind.modality)[part.source : part.source + part.length]
        x[part.start : part.stop, : rows.shape[1]] = rows
    return x


def dense_time(batch: PackedBatch, timestep: float, width: int) -> Tensor:
    rows = [packing.time_row_of(p.kind, timestep, width).expand(p.length, width) for p in batch.parts]
    return torch.cat(rows)


def longest_branch(batch: PackedBatch) -> int:
    is_padding = [p.kind is packing.Kind.PADDING for p in batch.parts]
    lengths = batch.segment_lengths[:-1] if is_padding[-1] else batch.segment_lengths
    return max(lengths)


def test_small_batch_equals_the_reference_row_by_row(small_path: Path) -> None:
    case = read(small_path)
    batch = packed(case)
    assert torch.equal(dense_rows(batch), case.tensors["x"])
    assert torch.equal(batch.coords, case.tensors["coords"])
    assert torch.equal(batch.modality, case.tensors["modality"])
    assert torch.equal(batch.cu_seqlens, case.tensors["cu_seqlens"])
    assert list(batch.segment_bounds) == case.tensors["cu_seqlens"].tolist()


def test_small_batch_notes_hold(small_path: Path) -> None:
    case = read(small_path)
    batch = packed(case)
    assert longest_branch(batch) == int(case.notes["max_seqlen"])
    padding = sum(p.length for p in batch.parts if p.kind is packing.Kind.PADDING)
    assert padding == int(case.notes.get("pad", 0))


def test_small_time_rows_equal_the_reference(small_path: Path) -> None:
    case = read(small_path)
    want = case.tensors["time"]
    got = dense_time(packed(case), int(case.tensors["timestep"]), want.shape[1])
    torch.testing.assert_close(got, want, **tolerances.TIME_ROWS)


def test_small_prediction_unpacks_to_both_branches(small_path: Path) -> None:
    case = read(small_path)
    video, audio = packing.unpack(case.tensors["model_out"], packed(case))
    assert torch.equal(video, case.tensors["out_video"])
    assert torch.equal(audio, case.tensors["out_audio"])


def formula(shape: tuple[int, ...], modulus: int, shift: int) -> Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % modulus) - shift).reshape(shape).to(torch.float32)


def packed_full(case: dict[str, Any], *, align: int = 1) -> PackedBatch:
    """Build the inputs of `packing_full.json` by the formulas that it states."""
    time, height, width = case["latent_THW"]
    text_width = case["text_width"]
    refs: tuple[Reference, ...] = ()
    if case["ref_grid"]:
        rows, columns = case["ref_grid"]
        special = formula((1, 1, text_width), 5, 2).bfloat16()
        refs = (Reference(formula((1, 48, 1, rows, columns), 31, 15), special),)
    text = formula((1, case["text_tokens"], text_width), 17, 8).bfloat16()
    negative = formula((1, case["neg_text_tokens"], text_width), 13, 6).bfloat16()
    return packing.pack(
        formula((1, 48, time, height, width), 251, 0),
        formula((1, case["audio_tokens"], 64), 127, 63),
        Conditioning((text, negative), refs),
        align=align,
    )


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_true_sizes_give_the_reference_lengths(full: dict[str, Any]) -> None:
    batch = packed_full(full)
    assert batch.cu_seqlens.tolist() == full["cu_seqlens"]
    assert batch.num_tokens == full["total"]
    assert longest_branch(batch) == full["max_seqlen"]
    counts = {str(m): int((batch.modality == m).sum()) for m in batch.modality.unique().tolist()}
    assert counts == full["modality_counts"]


def test_true_sizes_pad_to_the_reference_total(full: dict[str, Any]) -> None:
    assert packed_full(full, align=48).num_tokens == full["padded_to_48"]


def test_true_sizes_give_the_reference_coordinates(full: dict[str, Any]) -> None:
    batch = packed_full(full)
    for row, want in full["coords_sample"].items():
        assert batch.coords[int(row)].tolist() == want
    assert digest(batch.coords) == full["coords_sha256"]


def test_true_sizes_give_the_reference_modalities(full: dict[str, Any]) -> None:
    batch = packed_full(full)
    for row, want in full["modality_sample"].items():
        assert int(batch.modality[int(row)]) == want
    assert digest(batch.modality) == full["modality_int32_sha256"]


def test_true_sizes_give_the_reference_features(full: dict[str, Any]) -> None:
    assert digest(dense_rows(packed_full(full))) == full["x_f32_sha256"]


def test_true_sizes_give_the_reference_time_rows(full: dict[str, Any]) -> None:
    for kind, key in ((packing.Kind.VIDEO, "time_row_noisy"), (packing.Kind.TEXT, "time_row_clean")):
        want = torch.tensor(full[key])
        got = packing.time_row_of(kind, full["timestep"], want.numel())
        torch.testing.assert_close(got, want, **tolerances.TIME_ROWS_FULL)
