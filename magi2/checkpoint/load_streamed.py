"""Loading of a transformer whose layers come from the host: masters, slots, and the layers in their places.

Promises: as strict as `magi2.checkpoint.load`, before any weight is read; a rank's own part is taken first
and shared out among ranks that gather second; blocks are read one after the other, so the host needs the
masters and one block; every rank starts or none, and the model is changed only when nothing can fail any
more. What does not lie in a layer is loaded as ever.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from magi2.checkpoint.index import scan_folder
from magi2.checkpoint.keys import build_on_meta, compare, needs_of
from magi2.checkpoint.load import FileSource, Source, averaged, refuse_meta
from magi2.config import ModelConfig
from magi2.errors import CheckpointError, EngineFailure
from magi2.model.distribute import Own, distribute
from magi2.model.layer import Layer
from magi2.model.streamed import Cut, Streamer, cuts_of, stream
from magi2.model.transformer import Magi2Transformer
from magi2.offload.agreement import agree_on_budget, agree_on_success, agree_on_weights
from magi2.offload.flats import Flat, Need, Piece, digest, plan_piece, share, stamp
from magi2.offload.lazy import HostRuntime
from magi2.offload.masters import HostMemory, Masters, PrivateMemory
from magi2.offload.memory import available_host_bytes
from magi2.offload.ring import NUM_SLOTS, Ring
from magi2.offload.runtime import CudaRuntime, Runtime
from magi2.offload.shared import SharedMemory
from magi2.parallel.groups import Group, Groups
from magi2.parallel.memory import BY_LAYER, resident_layers


@dataclass(frozen=True)
class Streaming:
    """How layers come to the device.

    Args:
        by: A whole layer at once, or the experts of one MoE head.
        num_resident: Layers that stay on the device.
        num_slots: Pieces on the device at once.
        shared_folder: Of masters that processes of this machine share; None keeps them to this process.
    """

    by: str = BY_LAYER
    num_resident: int = 0
    num_slots: int = NUM_SLOTS
    shared_folder: Path | None = None


def load_streamed(
    folder: Path,
    config: ModelConfig,
    streaming: Streaming,
    *,
    runtime: Runtime | None = None,
    device: torch.device | str = "cpu",
    flash_attn_version: int | None = None,
    groups: Groups | None = None,
) -> Magi2Transformer:
    """Build the transformer with its layers' weights on the host.

    Args:
        folder: Holds the index and its shards, or one file.
        config: Sizes and dtype.
        streaming: Cut, residents and slots.
        runtime: Streams of the device; made if not given.
        device: Where the model computes.
        flash_attn_version: Handed to the model.
        groups: Of this rank; None means one device.

    Raises:
        CheckpointError: Files are missing or broken, or tensors are missing, not expected or misshapen.
        LayoutError: The layout does not fit the model, or the host has too little memory.
        EngineFailure: A rank failed, or ranks that gather hold different weights.
    """
    groups = groups or Groups()
    device = torch.device(device)
    runtime = runtime or (CudaRuntime(device) if device.type == "cuda" else HostRuntime())
    model = build_on_meta(config, flash_attn_version=flash_attn_version)
    contents = scan_folder(folder)
    problems = contents.problems + compare(needs_of(model), contents.tensors)
    if problems:
        raise CheckpointError(problems)
    with ExitStack() as files:
        source = FileSource(contents.tensors, files)
        key = _key(folder, config, groups, streaming)
        return stream_from(model, source, streaming, runtime=runtime, groups=groups, memory=key)


def stream_from(
    model: Magi2Transformer,
    source: Source,
    streaming: Streaming,
    *,
    runtime: Runtime,
    groups: Groups,
    memory: HostMemory | str,
    free_bytes: int | None = None,
) -> Magi2Transformer:
    """Give a model without memory masters of its layers, from a source of all tensors.

    Args:
        model: On the meta device.
        source: Of all tensors, whole ones of the right shapes.
        streaming: Cut, residents and slots.
        runtime: Streams of the device on which the model computes.
        groups: Of this rank.
        memory: Of the masters; or the key under which processes of this machine share them.
        free_bytes: Of the host; None means what it says of itself.

    Raises:
        LayoutError: The layout does not fit the model, or the host has too little memory.
        EngineFailure: A rank failed, or ranks that gather hold different weights.
    """
    own = distribute(model, groups, device_type=runtime.device.type)
    work = _Loading(model, runtime, groups, streaming, _plan(model, streaming))
    memory = work.open_memory(memory) if isinstance(memory, str) else memory
    masters = Masters(runtime, memory, work.plan.streamed, groups.weights.size)
    agree_on_budget(
        groups.world,
        pinned_bytes=masters.missing_bytes,
        scratch_bytes=work.plan.largest_block,
        free_bytes=available_host_bytes() if free_bytes is None else free_bytes,
    )
    failure: Exception | None = None
    try:
        work.read(_Reader(source, own), masters, memory)
        work.make_ring(masters)
    except (EngineFailure, OSError, RuntimeError, MemoryError) as error:
        failure = error
    try:
        agree_on_success(groups.world, failure)
        agree_on_weights(groups.weights, work.digests)
    except (EngineFailure, OSError, RuntimeError, MemoryError):
        masters.close()
        raise
    return work.install()


@dataclass(frozen=True)
class _Plan:
    """Every layer's cuts, the pieces that are streamed, by layer, and whole layers that stay."""

    cuts: Sequence[Sequence[Cut]]
    streamed: Mapping[int, Sequence[Piece]]
    resident: Mapping[int, Piece]

    @property
    def pieces(self) -> list[tuple[int, int, Piece]]:
        """All streamed pieces in their order: layer, place in the layer, piece."""
        return [
            (layer, place, piece) for layer, own in self.streamed.items() for place, piece in enumerate(own)
        ]

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block, whole."""
        blocks = [*self.streamed.values(), *([piece] for piece in self.resident.values())]
        return max(sum(piece.nbytes for piece in own) for own in blocks)


def _plan(model: Magi2Transformer, streaming: Streaming) -> _Plan:
    stay = resident_layers(len(model.block.layers), streaming.num_resident)
    cuts, streamed, resident, number = [], {}, {}, 0
    for index, layer in enumerate(_layers(model)):
        own = cuts_of(layer, BY_LAYER if index in stay else streaming.by)
        pieces = []
        for cut in own:
            pieces.append(plan_piece(number, index, _needs(layer, cut)))
            number += 1
        cuts.append(own)
        if index in stay:
            [resident[index]] = pieces
        else:
            streamed[index] = pieces
    return _Plan(cuts, streamed, resident)


def _needs(layer: Layer, cut: Cut) -> dict[str, Need]:
    state = layer.state_dict()
    needs = {}
    for part in cut.parts:
        shape = tuple(state[part.name].shape)
        if part.rows is not None:
            shape = (part.rows[1] - part.rows[0], *shape[1:])
        needs[part.name] = Need(shape, state[part.name].dtype)
    return needs


@dataclass(frozen=True)
class _Reader:
    """Reads a rank's own part of the tensors of a source."""

    source: Source
    own: Mapping[str, Own]

    def __call__(self, name: str) -> Tensor:
        """Return this rank's part of a tensor."""
        return self.source(averaged(name), self.own[name])


class _Loading:
    """The parts of a streamed model while it is made."""

    def __init__(
        self, model: Magi2Transformer, runtime: Runtime, groups: Groups, streaming: Streaming, plan: _Plan
    ) -> None:
        self.plan = plan
        self.digests: list[int] = []
        self._model, self._runtime, self._groups, self._streaming = model, runtime, groups, streaming
        self._fresh = {name: _placeholder(like, runtime.device) for name, like in _state(model).items()}
        self._kept: list[Tensor] = []
        self._ring: Ring | None = None

    def open_memory(self, key: str) -> HostMemory:
        """Return memory for the masters: shared if it was asked for and there is room."""
        folder = self._streaming.shared_folder
        if folder is None:
            return PrivateMemory()
        try:
            shared = SharedMemory(folder, key)
        except OSError:  # a folder that cannot be used costs memory, which the budget counts
            return PrivateMemory()
        needed = Masters(self._runtime, shared, self.plan.streamed, self._groups.weights.size).missing_bytes
        if needed <= shutil.disk_usage(folder).free:
            return shared
        shared.close()
        return PrivateMemory()

    def read(self, reader: _Reader, masters: Masters, memory: HostMemory) -> None:
        """Read what lies outside the layers, the layers that stay, and the masters."""
        for name, fresh in self._fresh.items():
            if not name.startswith("block.layers."):
                fresh.data = reader(name).to(device=self._runtime.device, dtype=fresh.dtype)
        for layer, piece in self.plan.resident.items():
            self._keep(layer, piece, reader)
        for layer, pieces in self.plan.streamed.items():
            self._write_block(layer, pieces, reader, masters, memory)
        if isinstance(memory, SharedMemory):
            memory.all_done()
        masters.lock()

    def make_ring(self, masters: Masters) -> None:
        """Allocate the slots, once and for all."""
        pieces = self.plan.pieces
        if not pieces:
            return
        targets = [
            {part.name: self._fresh[_full(layer, part.name)] for part in self.plan.cuts[layer][place].parts}
            for layer, place, _ in pieces
        ]
        self._ring = Ring(
            self._runtime,
            [piece for _, _, piece in pieces],
            targets,
            masters,
            num_slots=self._streaming.num_slots,
            group=self._groups.weights,
        )

    def install(self) -> Magi2Transformer:
        """Put everything into the model; nothing here fails for want of memory."""
        for name, fresh in self._fresh.items():
            path, _, last = name.rpartition(".")
            setattr(self._model.get_submodule(path), last, fresh)
        refuse_meta(self._model)
        places = {(layer, place): index for index, (layer, place, _) in enumerate(self.plan.pieces)}
        streamer = Streamer(self._runtime, self._ring, places, self._kept)
        stream(self._model, self.plan.cuts, streamer)
        return self._model.eval()

    def _keep(self, layer: int, piece: Piece, reader: _Reader) -> None:
        """Bring a layer that stays to the device, in one copy a dtype."""
        for flat in piece.flats:
            whole = self._whole(layer, self.plan.cuts[layer][0], piece, flat, reader)
            kept = whole.to(self._runtime.device)
            self._kept.append(kept)
            for name, view in flat.views(kept):
                self._fresh[_full(layer, name)].data = view

    def _write_block(
        self, layer: int, pieces: Sequence[Piece], reader: _Reader, masters: Masters, memory: HostMemory
    ) -> None:
        """Write the masters of a layer: the rank's own tensors first, their shares second."""
        weights: Group = self._groups.weights
        known = memory.digest_of(layer)
        opened = masters.open_block(layer)
        if known is None:
            known = 0
            for cut, piece in zip(self.plan.cuts[layer], pieces, strict=True):
                for flat in piece.flats:
                    whole = self._whole(layer, cut, piece, flat, reader)
                    if weights.size > 1:
                        known = (known * 31 + digest(whole)) % 2**62
                    opened[piece.number, flat.dtype].copy_(share(whole, weights.size, weights.position))
            memory.fill_done(layer, known)
        self.digests.append(known)

    def _whole(self, layer: int, cut: Cut, piece: Piece, flat: Flat, reader: _Reader) -> Tensor:
        """Return a flat of a piece, filled, in ordinary memory."""
        whole = torch.zeros(flat.numel, dtype=flat.dtype)
        stamp(whole, piece.number)
        rows = {part.name: part.rows for part in cut.parts}
        for name, view in flat.views(whole):
            stored, own = reader(_full(layer, name)), rows[name]
            view.copy_(stored if own is None else stored[own[0] : own[1]])
        return whole


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _placeholder(like: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=device)
    return nn.Parameter(empty, requires_grad=False) if isinstance(like, nn.Parameter) else empty


def _full(layer: int, name: str) -> str:
    return f"block.layers.{layer}.{name}"


def _layers(model: Magi2Transformer) -> list[Layer]:
    return [layer for layer in model.block.layers if isinstance(layer, Layer)]


def _key(folder: Path, config: ModelConfig, groups: Groups, streaming: Streaming) -> str:
    """Name masters by all that shapes them: the files, the cut, and this rank's part."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = {
        "folder": str(folder.resolve()),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "model": config.to_arch_config(),
        "by": [streaming.by, streaming.num_resident],
        "experts": [groups.layout.expert_ranks, groups.ep.position],
        "tensors": [groups.tp.size, groups.tp.position],
        "shares": [groups.weights.size, groups.weights.position],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
