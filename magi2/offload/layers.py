"""A plain stack of layers, of any network, streamed through two slots: for an encoder that does not fit.

Promises: the layers' results are those of the resident stack, bit for bit at equal alignment; each layer is
finished before its caller goes on, who may look at what it gave. Layers of equal sizes are streamed best, any
others too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from magi2.errors import EngineError
from magi2.offload.flats import Need, Piece, plan_piece, stamp
from magi2.offload.masters import Masters, PrivateMemory
from magi2.offload.ring import Ring
from magi2.offload.runtime import Runtime


class _Visitor(nn.Module):
    """A layer whose weights come for its turn."""

    def __init__(self, layer: nn.Module, place: int, ring: Ring, runtime: Runtime) -> None:
        super().__init__()
        self.layer = layer
        self._place, self._ring, self._runtime = place, ring, runtime

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        out: list[Any] = []
        self._ring.run(self._place, lambda: out.append(self.layer(*args, **kwargs)))
        self._runtime.settle()
        return out[0]


def stream_layers(layers: nn.ModuleList, runtime: Runtime) -> Ring:
    """Move the weights of a stack's layers into masters, and put streamed layers in their places.

    Args:
        layers: With weights on the host; the list is changed in place.
        runtime: Of the device on which they run from now on.

    Raises:
        EngineError: There are fewer than two layers, or a layer shares a tensor with another.
    """
    states = [_state(layer) for layer in layers]
    seen = [id(tensor) for state in states for tensor in state.values()]
    if len(set(seen)) < len(seen):
        raise EngineError("layers that share tensors cannot be streamed one by one")
    pieces = [
        plan_piece(place, place, {name: Need(tuple(t.shape), t.dtype) for name, t in state.items()})
        for place, state in enumerate(states)
    ]
    masters = Masters(runtime, PrivateMemory(), {piece.block: [piece] for piece in pieces}, 1)
    for piece, state in zip(pieces, states, strict=True):
        _write(masters, piece, state)
    masters.lock()
    for state in states:
        for tensor in state.values():  # the ring binds views on its device, which may be another
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=runtime.device)
    ring = Ring(runtime, pieces, states, masters)
    for place, layer in enumerate(list(layers)):
        layers[place] = _Visitor(layer, place, ring, runtime)
    return ring


def _state(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def _write(masters: Masters, piece: Piece, state: dict[str, Tensor]) -> None:
    opened = masters.open_block(piece.block)
    for flat in piece.flats:
        whole = opened[piece.number, flat.dtype]
        stamp(whole, piece.number)
        for name, view in flat.views(whole):
            view.copy_(state[name])
