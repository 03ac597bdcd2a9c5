"""Packed batches: what the transformer reads, in one sequence of tokens, and the way back to latents.

A segment is one branch, `[video | audio | text | special 1 | reference 1 | special 2 | ...]`; attention never
crosses a segment. Promises: the rows stay in one tensor per modality (both branches share the latents' rows)
and never become one matrix as wide as the text; all lengths are host integers, so nothing waits for a device.
Both branches, or one alone, can be packed. It computes no feature and holds no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

VIDEO, AUDIO, TEXT = 0, 1, 2
CONDITIONAL, UNCONDITIONAL = 0, 1
# Free latent time steps between the clip's last one and the first reference image.
_REFERENCE_GAP = 2
# Audio latents to one video latent on the common time axis.
_AUDIO_PER_VIDEO = 8
_TIME_MAX_PERIOD = 10_000
_TIMESTEPS = 1000


class Denoiser(Protocol):
    """What the sampling loop asks of a model; the loop knows no other part of it."""

    def predict(self, video: Tensor, audio: Tensor, timestep: int) -> tuple[Tensor, Tensor]:
        """Predict the velocity of both branches at one timestep.

        Args:
            video: fp32 [1, Z, T, Y, X], noisy.
            audio: fp32 [1, A, Z], noisy.
            timestep: The integer that the sampler's schedule gives for this step.

        Returns:
            fp32 [2, Z, T, Y, X] and [2, A, Z]; row 0 is the conditional branch.
        """
        ...


class Kind(Enum):
    """What a run of packed rows stands for."""

    VIDEO = "video"
    AUDIO = "audio"
    TEXT = "text"
    SPECIAL = "special"
    REFERENCE = "reference"
    PADDING = "padding"

    @property
    def modality(self) -> int:
        """Whose weights the rows use: a reference image counts as video, its special token as text."""
        return {Kind.VIDEO: VIDEO, Kind.REFERENCE: VIDEO, Kind.AUDIO: AUDIO}.get(self, TEXT)

    @property
    def is_generated(self) -> bool:
        """Whether the rows are latents that change from step to step."""
        return self in (Kind.VIDEO, Kind.AUDIO)


class Run(NamedTuple):
    """Packed rows [start, stop) of one modality."""

    start: int
    stop: int
    modality: int


@dataclass(frozen=True)
class Part:
    """Packed rows [start, stop), which show the rows from `source` on of their modality's tensor."""

    kind: Kind
    segment: int
    start: int
    length: int
    source: int

    @property
    def stop(self) -> int:
        """First packed row behind the part."""
        return self.start + self.length


@dataclass(frozen=True)
class Reference:
    """One reference image: fp32 latent [1, Z, 1, Y, X] and the pooled feature of its marker, [1, 1, W]."""

    latent: Tensor
    special: Tensor


@dataclass(frozen=True)
class Conditioning:
    """What a request is conditioned on, constant over its steps.

    Args:
        text: Features [1, L, W] of the conditional and of the unconditional branch, any float dtype.
        references: At most one in a released request; order is their number.
        use_reference_for_uncond: The unconditional branch sees the image too; otherwise its patches are zero.
    """

    text: tuple[Tensor, Tensor]
    references: tuple[Reference, ...] = ()
    use_reference_for_uncond: bool = True


@dataclass(frozen=True)
class PackedBatch:
    """One packed sequence of L tokens.

    Args:
        parts: In packed order, without gaps.
        segment_lengths: Rows of each segment; padding is a segment of its own.
        grid: (T, Y, X) of the video latent.
        video, audio, text: fp32 [rows, width], one tensor per modality; generated rows come first, then those
            of reference images; special tokens and padding follow the text.
        coords: fp32 [L, 9]: position, size of the part, reference size, each (t, h, w).
        modality: int32 [L].
        cu_seqlens: int32 [segments + 1].
    """

    parts: tuple[Part, ...]
    segment_lengths: tuple[int, ...]
    grid: tuple[int, int, int]
    video: Tensor
    audio: Tensor
    text: Tensor
    coords: Tensor
    modality: Tensor
    cu_seqlens: Tensor

    @property
    def num_tokens(self) -> int:
        """Rows of the packed sequence, L."""
        return sum(self.segment_lengths)

    @property
    def segment_bounds(self) -> tuple[int, ...]:
        """`cu_seqlens` as host integers."""
        return tuple(accumulate(self.segment_lengths, initial=0))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The longest runs of one modality, in packed order."""
        return merge_runs(Run(p.start, p.stop, p.kind.modality) for p in self.parts)

    def rows(self, modality: int) -> Tensor:
        """Return the tensor that holds the rows of one modality."""
        return (self.video, self.audio, self.text)[modality]


def clip_parts(parts: Iterable[Part], first: int, last: int) -> tuple[Part, ...]:
    """Return what a slice [first, last) of the packed rows holds of the parts, counted from its own start."""
    clipped = []
    for part in parts:
        start, stop = max(part.start, first), min(part.stop, last)
        if start < stop:
            source = part.source + start - part.start
            clipped.append(Part(part.kind, part.segment, start - first, stop - start, source))
    return tuple(clipped)


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join neighbours of one modality and drop empty runs."""
    merged: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if merged and merged[-1].modality == run.modality and merged[-1].stop == run.start:
            merged[-1] = merged[-1]._replace(stop=run.stop)
        else:
            merged.append(run)
    return tuple(merged)


def latent_rows(video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents [1, Z, T, Y, X] and [1, A, Z] as rows [T*Y*X, Z] and [A, Z], w fastest."""
    return video[0].flatten(1).T.contiguous(), audio[0]


def pack(
    video: Tensor,
    audio: Tensor,
    conditioning: Conditioning,
    *,
    branches: Sequence[int] = (CONDITIONAL, UNCONDITIONAL),
    align: int = 1,
) -> PackedBatch:
    """Pack one sample's branches into one sequence on the latents' device.

    Args:
        video: fp32 [1, Z, T, Y, X].
        audio: fp32 [1, A, Z].
        conditioning: Text and reference images.
        branches: Which branches become segments, in this order.
        align: The total is raised to a multiple of this by zero rows in a segment of their own.
    Source: the reference, inference/pipeline/preview_data_proxy.py. Differs: three tensors instead of one
        matrix; padding only when asked for.
    """
    builder = _Builder(video, audio, conditioning)
    for segment, branch in enumerate(branches):
        builder.add_branch(segment, branch)
    builder.add_padding(len(branches), align)
    return builder.build()


def unpack(out: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Take the generated rows of the transformer's output [L, width] back to latents.

    Returns:
        [branches, Z, T, Y, X] and [branches, A, Z], in the order of the segments.
    """
    video_width, audio_width = batch.video.shape[1], batch.audio.shape[1]
    video = [out[p.start : p.stop, :video_width].T for p in batch.parts if p.kind is Kind.VIDEO]
    audio = [out[p.start : p.stop, :audio_width] for p in batch.parts if p.kind is Kind.AUDIO]
    latents = torch.stack(video)
    return latents.reshape(*latents.shape[:2], *batch.grid), torch.stack(audio)


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Return fp32 [n, width], cosines then sines, for times fp32 [n] given as timestep / 1000.

    Source: the reference, inference/pipeline/preview_data_proxy.py; fp32 throughout, as fp64 frequencies miss
        its rows by 3e-5.
    """
    half = width // 2
    frequencies = torch.exp(-math.log(_TIME_MAX_PERIOD) * torch.arange(half, dtype=torch.float32) / half)
    angles = (time * _TIMESTEPS)[:, None] * frequencies
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)


def time_row(timestep: float, width: int) -> Tensor:
    """Return the time embedding fp32 [width] of one timestep."""
    return time_embedding(torch.tensor([timestep], dtype=torch.float32) / _TIMESTEPS, width)[0]


def time_row_of(kind: Kind, timestep: float, width: int) -> Tensor:
    """Return the time row that the rows of a part carry: the step's, the clean one, or zero for padding."""
    if kind is Kind.PADDING:
        return torch.zeros(width)
    return time_row(timestep if kind.is_generated else 0.0, width)


class _Builder:
    """Collects parts and the rows they show, in packed order."""

    def __init__(self, video: Tensor, audio: Tensor, conditioning: Conditioning) -> None:
        self.device = video.device
        self.conditioning = conditioning
        self.grid: tuple[int, int, int] = (video.shape[2], video.shape[3], video.shape[4])
        self.num_audio = audio.shape[1]
        video_rows, audio_rows = latent_rows(video.float(), audio.float())
        self.rows: dict[int, list[Tensor]] = {VIDEO: [video_rows], AUDIO: [audio_rows], TEXT: []}
        self.parts: list[Part] = []
        self.coords: list[Tensor] = []
        self.segment_lengths: list[int] = []
        self.reference_sources: dict[tuple[int, bool], int] = {}
        self.special_sources: dict[int, int] = {}

    def add_branch(self, segment: int, branch: int) -> None:
        """Append one segment."""
        first = self._num_tokens()
        latents = max(self.num_audio - 1, 0) // _AUDIO_PER_VIDEO + 1
        self._add(Kind.VIDEO, segment, 0, _grid_coords(self.grid))
        self._add(Kind.AUDIO, segment, 0, _line_coords(0, self.num_audio, latents))
        text = self.conditioning.text[branch]
        features = text.reshape(-1, text.shape[-1])
        length = features.shape[0]
        self._add(Kind.TEXT, segment, self._store(TEXT, features), _line_coords(-length, length, 1))
        for index, reference in enumerate(self.conditioning.references):
            self._add_reference(segment, branch, index, reference)
        self.segment_lengths.append(self._num_tokens() - first)

    def add_padding(self, segment: int, align: int) -> None:
        """Append the rows that raise the total to a multiple of `align`, if any."""
        count = -self._num_tokens() % align
        if count:
            width = self.conditioning.text[0].shape[-1]
            source = self._store(TEXT, torch.zeros(count, width))
            self._add(Kind.PADDING, segment, source, _line_coords(0, count, count))
            self.segment_lengths.append(count)

    def build(self) -> PackedBatch:
        """Return the batch on the latents' device."""
        modality = torch.tensor([p.kind.modality for p in self.parts], dtype=torch.int32)
        lengths = torch.tensor([p.length for p in self.parts])
        bounds = list(accumulate(self.segment_lengths, initial=0))
        return PackedBatch(
            parts=tuple(self.parts),
            segment_lengths=tuple(self.segment_lengths),
            grid=self.grid,
            video=torch.cat(self.rows[VIDEO]),
            audio=torch.cat(self.rows[AUDIO]),
            text=torch.cat(self.rows[TEXT]),
            coords=torch.cat(self.coords).to(self.device),
            modality=modality.repeat_interleave(lengths).to(self.device),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=self.device),
        )

    def _add_reference(self, segment: int, branch: int, index: int, reference: Reference) -> None:
        height, width = reference.latent.shape[-2:]
        size = (1, height, width)
        time = self.grid[0] + _REFERENCE_GAP + index
        is_blank = branch == UNCONDITIONAL and not self.conditioning.use_reference_for_uncond
        if index not in self.special_sources:
            special = reference.special
            self.special_sources[index] = self._store(TEXT, special.reshape(1, special.shape[-1]))
        if (index, is_blank) not in self.reference_sources:
            patches = reference.latent[0, :, 0].flatten(1).T
            patches = torch.zeros_like(patches) if is_blank else patches
            self.reference_sources[index, is_blank] = self._store(VIDEO, patches)
        special_coords = torch.tensor([[time, -1, -1, *size, *size]], dtype=torch.float32)
        self._add(Kind.SPECIAL, segment, self.special_sources[index], special_coords)
        patch_coords = _grid_coords(size, first_time=time)
        self._add(Kind.REFERENCE, segment, self.reference_sources[index, is_blank], patch_coords)

    def _add(self, kind: Kind, segment: int, source: int, coords: Tensor) -> None:
        self.parts.append(Part(kind, segment, self._num_tokens(), coords.shape[0], source))
        self.coords.append(coords)

    def _store(self, modality: int, rows: Tensor) -> int:
        source = sum(stored.shape[0] for stored in self.rows[modality])
        self.rows[modality].append(rows.to(self.device, torch.float32))
        return source

    def _num_tokens(self) -> int:
        return self.parts[-1].stop if self.parts else 0


def _grid_coords(size: tuple[int, int, int], *, first_time: int = 0) -> Tensor:
    """Coordinates of a (t, h, w) grid, w fastest, whose reference size is its own size."""
    axes = [torch.arange(n, dtype=torch.float32) for n in size]
    axes[0] = axes[0] + first_time
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    sizes = torch.tensor([*size, *size], dtype=torch.float32).expand(positions.shape[0], 6)
    return torch.cat([positions, sizes], dim=1)


def _line_coords(first: int, length: int, reference_length: int) -> Tensor:
    """Coordinates of `length` steps along time, stretched over `reference_length` steps."""
    coords = torch.tensor([0, 0, 0, length, 1, 1, reference_length, 1, 1], dtype=torch.float32)
    coords = coords.repeat(length, 1)
    coords[:, 0] = torch.arange(first, first + length)
    return coords
