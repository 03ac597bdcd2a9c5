"""A ring of toy pieces: each adds up its own weights, so wrong bytes show in the sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi2.offload.flats import Need, Piece, plan_piece, share, stamp
from magi2.offload.lazy import HostRuntime
from magi2.offload.masters import Masters, PrivateMemory
from magi2.offload.ring import NUM_SLOTS, Ring
from magi2.offload.runtime import Stream
from magi2.parallel.groups import ALONE, Group

# Widths of the pieces' matrices: no two alike, the largest in the middle.
WIDTHS = (5, 130, 17, 300, 64)


@dataclass(eq=False)
class Toy:
    """A ring, the tensors it binds, and what each piece must compute."""

    ring: Ring
    runtime: HostRuntime
    targets: list[dict[str, Tensor]]
    weights: list[dict[str, Tensor]]
    masters: Masters

    def work(self, place: int, out: list[Tensor]) -> Callable[[], None]:
        def run() -> None:
            out.append(total(self.targets[place]))

        return run

    def one_pass(self, places: Sequence[int] | None = None) -> list[Tensor]:
        out: list[Tensor] = []
        for place in range(self.ring.size) if places is None else places:
            self.ring.run(place, self.work(place, out))
        self.runtime.settle()
        return out

    def wanted(self, places: Sequence[int] | None = None) -> list[Tensor]:
        return [total(self.weights[place]) for place in places or range(len(self.weights))]


def total(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensors[name].double().sum() for name in sorted(tensors)])


def weights_of(place: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(place)
    return {
        "matrix": torch.randn(3, width, generator=generator).bfloat16(),
        "norm": torch.randn(width, generator=generator),
        "scalar": torch.randn(1, generator=generator),
    }


def make(
    widths: Sequence[int] = WIDTHS,
    *,
    seed: int = 0,
    runtime: HostRuntime | None = None,
    num_slots: int = NUM_SLOTS,
    group: Group = ALONE,
) -> Toy:
    runtime = runtime or HostRuntime(seed=seed)
    weights = [weights_of(place, width) for place, width in enumerate(widths)]
    pieces = [
        plan_piece(place, place, {name: Need(tuple(t.shape), t.dtype) for name, t in own.items()})
        for place, own in enumerate(weights)
    ]
    masters = Masters(runtime, PrivateMemory(), {piece.block: [piece] for piece in pieces}, group.size)
    for piece, own in zip(pieces, weights, strict=True):
        fill(masters, piece, own, group)
    masters.lock()
    targets = [{name: torch.empty(0, dtype=t.dtype) for name, t in own.items()} for own in weights]
    ring = Ring(runtime, pieces, targets, masters, num_slots=num_slots, group=group)
    return Toy(ring, runtime, targets, weights, masters)


def fill(masters: Masters, piece: Piece, own: dict[str, Tensor], group: Group = ALONE) -> None:
    opened = masters.open_block(piece.block)
    for flat in piece.flats:
        whole = torch.zeros(flat.numel, dtype=flat.dtype)
        stamp(whole, piece.number)
        for name, view in flat.views(whole):
            view.copy_(own[name])
        opened[piece.number, flat.dtype].copy_(share(whole, group.size, group.position))


class Forgetful(HostRuntime):
    """Forgets to wait on one stream."""

    def __init__(self, stream: Stream, *, seed: int) -> None:
        super().__init__(seed=seed)
        self._forgotten = stream

    def wait(self, stream: Stream, event: object) -> None:
        if stream is not self._forgotten:
            super().wait(stream, event)
