"""Waves: replicas that gather each other's shares of the weights render one request each, side by side.

Promises: a wave has as many slots as there are replicas, and a request is rendered by the ranks of its slot's
data-parallel coordinate; all requests have equal steps and tier. A slot without a request, or whose request
was dropped or has failed, takes part in passes that gather and compute nothing, so the others go on
unchanged; an error stays with its request. All ranks leave at the same step. Who is in a wave is its caller's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from magi2.contract import GenerationRequest
from magi2.errors import EngineError, EngineFailure, InvalidInput, OutOfMemory, Stopped
from magi2.media.writer import ClipWriter
from magi2.offload.ring import Ring
from magi2.parallel.groups import Group
from magi2.parallel.layout import coordinates
from magi2.pipeline import Magi2Pipeline, Rendered
from magi2.record import ProgressFn, silent


@dataclass(frozen=True)
class Member:
    """A request of a wave and its uploaded image, if it has one."""

    request: GenerationRequest
    image: bytes | None = None


class Signal(Protocol):
    """What is asked before every step; the first rank's answers count."""

    def __call__(self) -> bool:
        """Tell whether the whole wave shall end."""

    def dropped(self) -> frozenset[int]:
        """Return the slots whose requests are no longer wanted; it only grows."""


class Undisturbed:
    """A signal that never asks for anything."""

    def __call__(self) -> bool:
        """Say no."""
        return False

    def dropped(self) -> frozenset[int]:
        """Return none."""
        return frozenset()


def render_wave(
    pipeline: Magi2Pipeline,
    members: Sequence[Member | None],
    *,
    progress: ProgressFn = silent,
    signal: Signal | None = None,
    writer: ClipWriter | None = None,
) -> Rendered | EngineFailure | None:
    """Render one wave; all ranks make the same call.

    Args:
        pipeline: Of a layout with replicas.
        members: One for each slot, None for a slot that stays empty; not all.
        progress: Told of this rank's own request.
        signal: Asked before every step.
        writer: Of this rank's clip; its caller finishes it.

    Returns:
        For this rank's slot: the clip on its output rank, or why there is none; None on other ranks and for
        an empty slot.

    Raises:
        EngineError: The requests cannot run together.
        EngineFailure: The ranks of a slot may differ in what they did, so this process must end.
    """
    num_steps = _check(pipeline, members)
    slot = coordinates(pipeline.groups.layout, pipeline.groups.rank).dp
    boundary = Boundary(pipeline.groups.world, len(members), slot, signal or Undisturbed())
    ring, own = _ring_of(pipeline), members[slot]
    until = ring.passes + num_steps
    outcome = None if own is None else _render(pipeline, own, boundary, progress, until, writer)
    boundary.is_alive = False
    _keep_up(ring, boundary, until, num_steps)
    return outcome


def render_one(
    pipeline: Magi2Pipeline,
    request: GenerationRequest,
    *,
    image: bytes | None = None,
    progress: ProgressFn = silent,
    writer: ClipWriter | None = None,
) -> Rendered | None:
    """Render one request on any layout, with replicas in the first slot of a wave; the clip is rank 0's.

    Raises:
        EngineFailure: As the pipeline does.
    """
    num_slots = pipeline.groups.layout.data_parallel
    if num_slots == 1:
        return pipeline(request, image=image, progress=progress, writer=writer)
    members = [Member(request, image), *([None] * (num_slots - 1))]
    outcome = render_wave(pipeline, members, progress=progress, writer=writer)
    if isinstance(outcome, EngineFailure):
        raise outcome
    return outcome


@dataclass(eq=False)
class Boundary:
    """The question before every step, asked and answered by all ranks of all replicas together.

    Args:
        world: All ranks.
        num_slots: Of the wave.
        slot: This rank's.
        signal: Asked on the first rank.
        count: How often it was asked: the number of the pass that may begin.
        is_alive: This rank renders its slot's request.
        is_dropped: The slot's request shall end.
        is_over: Nobody renders any more, or nobody shall.
    """

    world: Group
    num_slots: int
    slot: int
    signal: Signal
    count: int = 0
    is_alive: bool = True
    is_dropped: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)

    def __call__(self) -> bool:
        """Agree on the wave's state and return whether this slot's request shall end."""
        wanted_end, dropped = self.signal(), self.signal.dropped()
        own = torch.zeros(3, self.num_slots, dtype=torch.uint8)
        own[0, :] = int(wanted_end)
        own[1, [slot for slot in dropped if slot < self.num_slots]] = 1
        own[2, self.slot] = int(self.is_alive)
        said = self.world.stack(own)
        ending = (said[0, 0] | said[0, 1]).bool()
        living = said[:, 2].amax(dim=0).bool()
        self.count += 1
        self.is_dropped = bool(ending[self.slot])
        self.is_over = not bool((living & ~ending).any())
        return self.is_dropped


def _check(pipeline: Magi2Pipeline, members: Sequence[Member | None]) -> int:
    """Return the number of steps that all requests have."""
    num_slots = pipeline.groups.layout.data_parallel
    requests = [member.request for member in members if member is not None]
    if len(members) != num_slots or not requests:
        raise EngineError(
            f"a wave of this layout has {num_slots} slots, one or more filled (got {len(members)} slots, "
            f"{len(requests)} filled)"
        )
    keys = {(request.tier, request.num_inference_steps) for request in requests}
    if len(keys) > 1:
        kinds = ", ".join(f"{steps} steps at {tier}" for tier, steps in sorted(keys))
        raise EngineError(f"requests of one wave need equal steps and tier (got {kinds})")
    return requests[0].num_inference_steps


def _ring_of(pipeline: Magi2Pipeline) -> Ring:
    streamer = pipeline.transformer.streamer
    if streamer is None or streamer.ring is None:
        raise EngineError("waves need streamed weights: give the layout --dlo and --data-parallel")
    return streamer.ring


def _render(
    pipeline: Magi2Pipeline,
    own: Member,
    boundary: Boundary,
    progress: ProgressFn,
    until: int,
    writer: ClipWriter | None,
) -> Rendered | EngineFailure | None:
    """Render this rank's request, or say why not.

    Raises:
        EngineFailure: Other ranks of the slot may still be rendering.
    """
    try:
        return pipeline(
            own.request,
            image=own.image,
            progress=progress,
            should_stop=lambda: boundary.is_dropped,
            before_step=boundary,
            writer=writer,
        )
    except (InvalidInput, Stopped) as error:  # all ranks of the slot see the same
        return error
    except (EngineError, OutOfMemory) as error:
        if pipeline.groups.replica.size > 1 and _ring_of(pipeline).passes < until:
            raise
        return error


def _keep_up(ring: Ring, boundary: Boundary, until: int, num_steps: int) -> None:
    """Take part in the passes that the others have still to make."""
    if not ring.is_between_passes:
        ring.pass_by()
    while ring.passes < until and not boundary.is_over:
        if boundary.count == num_steps - (until - ring.passes):
            boundary()
            continue
        ring.pass_by()
