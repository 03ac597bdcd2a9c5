"""One layout: a few layers against one rank and against resident ones, then one step of all layers.

Resident layers are compared one by one: each layer of the rank gets what the single rank's layer got, cut to
its own rows, and takes the single rank's routes, since near scores change places in rounding; how often they
would have is told. Sharded and streamed layouts must give the bits of resident layers of the same cut, which
are compared with the single rank too. All in strict deterministic mode; the step of all layers, which is
timed, in the ordinary one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from benchmarks.four_gpus import weights
from benchmarks.four_gpus.rank import Place
from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.stages import NEAR_ONE_RANK, REPEATS, SAME_AS_TWIN, STEP
from benchmarks.four_gpus.world import (
    TIMESTEP,
    Inputs,
    add_peak,
    forget,
    inputs_of,
    num_differing,
    of_all,
    relative_l2,
    slowest,
    world_of,
)
from kernels.mh_moe import Routes
from magi2 import determinism, packing
from magi2.config import ModelConfig
from magi2.model.layer import Layer
from magi2.model.moe import MoE
from magi2.model.transformer import Magi2Transformer
from magi2.parallel.groups import Groups, open_groups
from magi2.parallel.layout import head_counts, span, split_lengths

TIER = "272p"
# Of one layer in bf16 whose sums come in another order.
NEAR = 1e-2
NUM_DISTINCT = 4
Prediction = tuple[Tensor, Tensor]


def run_layout(place: Place) -> None:
    """Compare, then time."""
    determinism.configure(deterministic=True)
    device = torch.device(place.device)
    with torch.no_grad(), world_of(place, place.layout) as groups:
        inputs = inputs_of(place, place.model, TIER, slot=groups.dp.position)
        config = weights.reduced(place.model)
        if place.layout.is_streamed or place.layout.hsdp:
            compare_with_twin(place, groups, config, inputs)
        else:
            add_repeats(place, groups, *compare_with_one_rank(place, groups, config, inputs))
        forget(device)
        determinism.configure(deterministic=False)
        time_step(place, groups, inputs)


@contextmanager
def model_of(
    place: Place, groups: Groups, config: ModelConfig, num_distinct: int
) -> Iterator[Magi2Transformer]:
    """Yield this rank's transformer in the layout of its groups."""
    device = torch.device(place.device)
    if not groups.layout.is_streamed:
        yield weights.resident(config, device, groups)
        return
    with weights.streamed(
        config, device, groups, num_distinct=num_distinct, host_bytes=place.host_bytes
    ) as model:
        yield model


def compare_with_twin(place: Place, groups: Groups, config: ModelConfig, inputs: Inputs) -> None:
    """A sharded or streamed layout: the bits of resident layers of the same cut, which are near one rank."""
    if groups.layout.hsdp:
        with open_groups(replace(groups.layout, hsdp=False), place.rank, timeout_s=place.limit_s) as plain:
            want, _ = compare_with_one_rank(place, plain, config, inputs)
    else:
        want, _ = compare_with_one_rank(place, groups, config, inputs)
    forget(torch.device(place.device))
    with model_of(place, groups, config, config.num_layers) as model:
        got, again = (inputs.predict(model) for _ in range(2))
    differing = of_all(groups.world, num_differing(got, want))
    finite = all(bool(torch.isfinite(part).all()) for part in got)
    facts = {"by_rank": differing, "finite": finite, "layers": config.num_layers}
    place.rows.add(Row(SAME_AS_TWIN, sum(differing), "", "0", finite and not sum(differing), facts))
    add_repeats(place, groups, got, again)


def add_repeats(place: Place, groups: Groups, got: Prediction, again: Prediction) -> None:
    """Add the row of a repetition, and whether all ranks of a replica hold the same bits."""
    differing = sum(of_all(groups.world, num_differing(again, got)))
    between = sum(num_differing((other,), (part,)) for part in got for other in groups.replica.stack(part))
    apart = sum(of_all(groups.world, between))
    facts = {"between_ranks": apart}
    place.rows.add(Row(REPEATS, differing, "", "0", not differing and not apart, facts))


def compare_with_one_rank(
    place: Place, groups: Groups, config: ModelConfig, inputs: Inputs
) -> tuple[Prediction, Prediction]:
    """Compare each resident layer with the single rank's; return two predictions of the resident layers."""
    device = torch.device(place.device)
    oracle, model = weights.resident(config, device, Groups()), weights.resident(config, device, groups)
    place.rows.say("the layers of one rank and of this one are drawn")
    want, got, again = inputs.predict(oracle), inputs.predict(model), inputs.predict(model)
    whole = max(of_all(groups.world, relative_l2(got, want)))
    errors, moved = layer_errors(groups, oracle, model, inputs)
    worst = max(error if isfinite(error) else inf for error in errors)
    facts = {
        "layers": [f"{error:.2e}" for error in errors],
        "whole_with_own_routes": f"{whole:.2e}",
        "share_of_routes_that_would_move": f"{moved:.2e}",
    }
    place.rows.add(Row(NEAR_ONE_RANK, worst, "relative L2", f"<= {NEAR:g}", worst <= NEAR, facts))
    return got, again


@dataclass
class _Seen:
    """The routes of one layer of the single rank, and how many a rank would have chosen otherwise."""

    routes: Routes | None = None
    num_moved: int = 0
    num_all: int = 0


@dataclass(frozen=True)
class _Part:
    """Which rows of the single rank's sequence are this rank's, and which its MoE heads see.

    Args:
        own: First row, and the one behind the last.
        routed: The same of the rows that come to its MoE heads.
        heads: First MoE head, and the one behind the last.
    """

    own: slice
    routed: slice
    heads: slice


def part_of(groups: Groups, config: ModelConfig, bounds: tuple[int, ...]) -> _Part:
    """Return this rank's part of a packed sequence with these segment bounds."""
    branch = groups.cfg.position
    first, last = (0, bounds[-1]) if groups.cfg.size == 1 else (bounds[branch], bounds[branch + 1])
    start, stop = span(split_lengths(last - first, groups.sp.size), groups.sp.position)
    own = slice(first + start, first + stop)
    counts = head_counts(config.moe.num_heads, groups.layout.expert_ranks)
    routed = own if groups.tp.size > 1 else slice(first, last)
    return _Part(own, routed, slice(*span(counts, groups.ep.position)))


def layer_errors(
    groups: Groups, oracle: Magi2Transformer, model: Magi2Transformer, inputs: Inputs
) -> tuple[list[float], float]:
    """Return every layer's relative L2 over all ranks, and the share of routes that would have moved."""
    video, audio = inputs.noise.video, inputs.noise.audio
    branches = (packing.CONDITIONAL, packing.UNCONDITIONAL)
    whole = packing.pack(video, audio, inputs.conditioning)
    own = branches if groups.cfg.size == 1 else (branches[groups.cfg.position],)
    prepared = model.prepare(packing.pack(video, audio, inputs.conditioning, branches=own))
    one = oracle.prepare(whole)
    time_row = packing.time_row(TIMESTEP, model.config.time_channel_dim).to(video.device)
    streams = oracle.embed(one, *packing.latent_rows(video, audio), time_row)
    part = part_of(groups, model.config, whole.segment_bounds)
    errors, seen = [], _Seen()
    for single, layer in zip(oracle.block.layers, model.block.layers, strict=True):
        mine = streams[part.own].clone()
        with remembering(single, seen):
            streams = single(streams, one.tokens)
        with given(layer, seen, part):
            mine = layer(mine, prepared.tokens)
        want = streams[part.own].double()
        sums = of_all(groups.world, float((mine.double() - want).square().sum()))
        norms = of_all(groups.world, float(want.square().sum()))
        errors.append((sum(sums) / sum(norms)) ** 0.5)
    moved, number = of_all(groups.world, seen.num_moved), of_all(groups.world, seen.num_all)
    return errors, sum(moved) / max(1.0, sum(number))


@contextmanager
def remembering(layer: Layer, seen: _Seen) -> Iterator[None]:
    """Keep the routes of a layer of the single rank."""
    if not isinstance(layer.mlp, MoE):
        yield
        return
    experts = layer.mlp.moe_mlp
    choose = experts.route

    def route(heads: Tensor) -> Routes:
        seen.routes = choose(heads)
        return seen.routes

    experts.route = route
    try:
        yield
    finally:
        del experts.route


@contextmanager
def given(layer: Layer, seen: _Seen, part: _Part) -> Iterator[None]:
    """Let a rank's layer take the routes that the single rank took for its heads and tokens."""
    if not isinstance(layer.mlp, MoE) or seen.routes is None:
        yield
        return
    experts = layer.mlp.moe_mlp
    choose, routes = experts.route, seen.routes

    def route(heads: Tensor) -> Routes:
        taken = Routes(
            routes.experts[part.heads, part.routed].contiguous(),
            routes.weights[part.heads, part.routed].contiguous(),
        )
        chosen = choose(heads).experts
        seen.num_moved += int((chosen.sort(-1).values != taken.experts.sort(-1).values).any(-1).sum())
        seen.num_all += chosen.shape[0] * chosen.shape[1]
        return taken

    experts.route = route
    try:
        yield
    finally:
        del experts.route


def time_step(place: Place, groups: Groups, inputs: Inputs) -> None:
    """One warm step of all layers, and the peak of every rank."""
    device, config = torch.device(place.device), place.model
    with model_of(place, groups, config, NUM_DISTINCT) as model:
        place.rows.say("all layers are in place")
        forget(device)
        inputs.predict(model)
        predicted: list[Tensor] = []
        seconds = slowest(groups, device, lambda: predicted.extend(inputs.predict(model)))
        is_finite = all(of_all(groups.world, all(bool(torch.isfinite(part).all()) for part in predicted)))
        facts = {"layers": config.num_layers, "finite": is_finite}
        place.rows.add(Row(STEP, seconds, "s", None, is_finite, facts))
        add_peak(place, groups, config, TIER)
