"""Layers whose weights come from the host: which tensors each piece has, and how a layer runs piece by piece.

A piece is a whole layer, or in the finer cut what runs before the experts, each MoE head's experts, and what
runs after them. Promises: the same operations in the same order on the same values as the resident layer, so
the same bits; a resident piece runs in place. It reads no file and moves no weight: that is the ring's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from magi2.errors import EngineError
from magi2.model.layer import Layer
from magi2.model.mhc import Reading
from magi2.model.moe import MoE, Sent
from magi2.model.tokens import Tokens
from magi2.model.transformer import Magi2Transformer
from magi2.offload.ring import Ring
from magi2.offload.runtime import Runtime
from magi2.parallel.memory import BY_LAYER

Value = TypeVar("Value")
_EXPERTS = "mlp.moe_mlp."
_AFTER = "mlp.merge_linear."


class Part(NamedTuple):
    """A tensor of a piece: its name in the layer, and the rows of it, None for all."""

    name: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Cut:
    """One piece of a layer: what it runs, which tensors it needs."""

    step: str
    parts: tuple[Part, ...]
    head: int = 0


def cuts_of(layer: Layer, by: str) -> list[Cut]:
    """List the pieces of a layer without memory, in the order in which they run.

    Args:
        layer: With this rank's own shapes.
        by: `layer` or `head`.
    """
    names = list(layer.state_dict())
    if by == BY_LAYER:
        return [Cut("whole", _all(names))]
    if not isinstance(layer.mlp, MoE):
        # The second half's gates come from the streams as the first leaves them, so it needs only its MLP.
        late = [name for name in names if name.startswith("mlp.")]
        return [Cut("begin", _all(n for n in names if n not in late)), Cut("dense", _all(late))]
    experts = [name for name in names if name.startswith(_EXPERTS)]
    after = [name for name in names if name.startswith(_AFTER)]
    first = [name for name in names if name not in experts and name not in after]
    size = layer.mlp.moe_mlp.settings.num_experts
    own_heads = layer.mlp.moe_mlp.gate.shape[0] // size
    heads = [
        Cut("head", tuple(Part(name, (head * size, (head + 1) * size)) for name in experts), head)
        for head in range(own_heads)
    ]
    return [Cut("before", _all(first)), *heads, Cut("after", _all(after))]


@dataclass(eq=False)
class Streamer:
    """The weights of a transformer that is not wholly on the device.

    Args:
        runtime: Of the device.
        ring: Of the pieces that are streamed; None where all stay.
        places: Of every streamed (layer, piece of it) in the ring; the others stay on the device.
        resident: What stays, kept alive.
        is_immediate: Every layer is finished before the next is asked for: for callers that look between.
    """

    runtime: Runtime
    ring: Ring | None
    places: Mapping[tuple[int, int], int]
    resident: Sequence[Tensor] = ()
    is_immediate: bool = False

    def run(self, layer: int, piece: int, work: Callable[[], None]) -> None:
        """Launch one piece's work, with its weights in place."""
        place = self.places.get((layer, piece))
        if place is None or self.ring is None:
            self.runtime.launch(work)
        else:
            self.ring.run(place, work)

    def close(self) -> None:
        """Let go of all weights; no peer is asked."""
        if self.ring is not None:
            self.ring.close()


class StreamedLayer(nn.Module):
    """A layer in the place of the resident one.

    Args:
        layer: Without weights of its own, but for those that stay.
        index: Of the layer.
        cuts: Its pieces.
        streamer: Brings them.
        is_last: Whoever called the layers looks at the streams after this one.
    """

    def __init__(
        self, layer: Layer, index: int, cuts: Sequence[Cut], streamer: Streamer, *, is_last: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self._index, self._cuts, self._streamer, self._is_last = index, cuts, streamer, is_last

    def forward(self, s_LSC: Tensor, tokens: Tokens) -> Tensor:
        """Update the streams in place and return them; all is done after the last layer at the latest."""
        run = _Run(self.layer, s_LSC, tokens)
        for piece, cut in enumerate(self._cuts):
            self._streamer.run(self._index, piece, run.work_of(cut))
        if self._is_last or self._streamer.is_immediate:
            self._streamer.runtime.settle()
        return s_LSC


@dataclass(eq=False)
class _Run:
    """One pass through one layer: what its pieces hand to each other."""

    layer: Layer
    streams: Tensor
    tokens: Tokens
    reading: Reading | None = None
    sent: Sent | None = None
    routed: Tensor | None = None
    steps: dict[str, Callable[[int], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = {
            "whole": self._whole,
            "begin": self._begin,
            "dense": self._dense,
            "before": self._before,
            "head": self._head,
            "after": self._after,
        }

    def work_of(self, cut: Cut) -> Callable[[], None]:
        """Return the work of one piece; run later, it must not track gradients either."""
        step, head = self.steps[cut.step], cut.head

        def work() -> None:
            with torch.no_grad():
                step(head)

        return work

    def _whole(self, _head: int) -> None:
        self.layer(self.streams, self.tokens)

    def _begin(self, _head: int) -> None:
        self.reading = self.layer.begin(self.streams, self.tokens)

    def _dense(self, _head: int) -> None:
        reading = _there(self.reading)
        self.layer.end(self.streams, reading, self.layer.mlp(reading.x, self.tokens), self.tokens)

    def _before(self, _head: int) -> None:
        self._begin(0)
        self.sent = self._moe.begin(_there(self.reading).x, self.tokens)
        self.routed = torch.empty_like(self.sent.heads)

    def _head(self, head: int) -> None:
        own = slice(head, head + 1)
        _there(self.routed)[:, own] = self._moe.moe_mlp(_there(self.sent).heads[:, own])

    def _after(self, _head: int) -> None:
        out_LC = self._moe.finish(_there(self.sent).out, _there(self.routed), self.tokens)
        self.layer.end(self.streams, _there(self.reading), out_LC, self.tokens)

    @property
    def _moe(self) -> MoE:
        mlp = self.layer.mlp
        if not isinstance(mlp, MoE):
            raise EngineError("a dense layer was cut by MoE heads")
        return mlp


def stream(model: Magi2Transformer, cuts: Sequence[Sequence[Cut]], streamer: Streamer) -> None:
    """Put streamed layers in the place of the resident ones."""
    last = len(cuts) - 1
    for index, (layer, own) in enumerate(zip(_layers(model), cuts, strict=True)):
        model.block.layers[index] = StreamedLayer(layer, index, own, streamer, is_last=index == last)
    model.streamer = streamer


def targets_of(layer: Layer, cut: Cut) -> dict[str, Tensor]:
    """Return the module tensors that a piece's weights are bound to, by their names in the layer."""
    state = dict(layer.named_parameters()) | dict(layer.named_buffers())
    return {part.name: state[part.name] for part in cut.parts}


def _layers(model: Magi2Transformer) -> Iterator[Layer]:
    for layer in model.block.layers:
        if not isinstance(layer, Layer):
            raise EngineError("the layers of this model are streamed already")
        yield layer


def _all(names: Sequence[str] | Iterator[str]) -> tuple[Part, ...]:
    return tuple(Part(name) for name in names)


def _there(value: Value | None) -> Value:
    """Return what an earlier piece left.

    Raises:
        EngineError: It did not run.
    """
    if value is None:
        raise EngineError("a piece of a layer ran before the one whose results it needs")
    return value
