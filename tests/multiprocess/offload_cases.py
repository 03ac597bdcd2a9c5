"""Streamed weights over ranks: shares gather to what was loaded; forwards and waves equal resident ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from magi2.checkpoint import load_streamed as module
from magi2.checkpoint.load_streamed import Streaming, load_streamed
from magi2.config import CacheConfig, EngineConfig
from magi2.contract import TIERS, GenerationRequest, Tier
from magi2.errors import EngineError, EngineFailure, Stopped
from magi2.model.transformer import Magi2Transformer
from magi2.offload.lazy import HostRuntime
from magi2.parallel.groups import Groups
from magi2.parallel.layout import Layout
from magi2.parallel.memory import BY_HEAD, BY_LAYER
from magi2.pipeline import Magi2Pipeline, Rendered
from magi2.sampling.cache import cached
from magi2.wave import Member, render_wave
from tests.cache_reference import Counts, always_caching
from tests.multiprocess.models import CONFIGS, load, predict, solve
from tests.multiprocess.registry import CASES, groups_of, largest_error
from tests.multiprocess.spawn import Case, World

DP4 = Layout(data_parallel=4, dlo=True)
DP2SP2 = Layout(data_parallel=2, ulysses=2, dlo=True)
DP2 = Layout(data_parallel=2, dlo=True)
DLO_SP4 = Layout(ulysses=4, dlo=True, dlo_no_allgather=True)
STEPS = 8
WORLDS: dict[int, list[str]] = {2: [], 4: []}
FORCED = CacheConfig(threshold=0.99, warmup_steps=2, max_consecutive=3)


def case(world: int, name: str) -> Callable[[Case], Case]:
    """Register a case of this file, which has spawns of its own."""

    def register(function: Case) -> Case:
        CASES[name] = function
        WORLDS[world].append(name)
        return function

    return register


def aligned(model: Magi2Transformer) -> Magi2Transformer:
    """Copy the layers' weights out of the mapped file, to where memory is aligned, as flats are."""
    for tensor in [*model.block.parameters(), *model.block.buffers()]:
        tensor.data = tensor.data.clone()
    return model


@contextmanager
def streamed(
    folder: Path, name: str, groups: Groups, *, by: str = BY_LAYER, seed: int = 0
) -> Iterator[Magi2Transformer]:
    model = load_streamed(
        folder / name, CONFIGS[name], Streaming(by), runtime=HostRuntime(seed=seed), groups=groups
    )
    try:
        yield model
    finally:
        model.streamer.close()


def gathered_tensors(model: Magi2Transformer) -> dict[str, Tensor]:
    """Copy every streamed tensor as a piece sees it in one pass; the pieces are whole layers."""
    found: dict[str, Tensor] = {}
    for (layer, _), place in model.streamer.places.items():
        targets = model.streamer.ring._targets[place]

        def look(layer: int = layer, targets: dict[str, Tensor] = targets) -> None:
            found.update({f"block.layers.{layer}.{name}": t.clone() for name, t in targets.items()})

        model.streamer.ring.run(place, look)
    model.streamer.runtime.settle()
    return found


def equals_resident(layout: Layout) -> Case:
    def run(at: World) -> None:
        with groups_of(at, layout) as groups:
            for name in ("plain", "bf16"):
                resident = aligned(load(at.folder, name, groups))
                want = resident.state_dict()
                timestep = 700 - 200 * groups.dp.position
                with streamed(at.folder, name, groups, seed=1) as model:
                    found = gathered_tensors(model)
                    assert len(found) == sum(key.startswith("block.layers.") for key in want)
                    assert all(torch.equal(tensor, want[key]) for key, tensor in found.items())
                for by in (BY_LAYER, BY_HEAD):
                    with streamed(at.folder, name, groups, by=by, seed=2) as model:
                        for with_image in (False, True, False):
                            got, known = (
                                predict(m, with_image=with_image, timestep=timestep)
                                for m in (model, resident)
                            )
                            assert largest_error(got, known) == 0.0, (name, by)

    return run


case(4, "DP4")(equals_resident(DP4))
case(4, "DP2SP2")(equals_resident(DP2SP2))
case(4, "DLO SP4 rank-local")(equals_resident(DLO_SP4))


@case(4, "DP4: passes of ghosts leave the others unchanged")
def ghosts(at: World) -> None:
    with groups_of(at, DP4) as groups, streamed(at.folder, "plain", groups) as model:
        want = solve(aligned(load(at.folder, "plain")), 3)
        if at.rank in (0, 2):
            assert largest_error(solve(model, 3), want) == 0.0
        else:
            for _ in range(3):
                model.streamer.ring.pass_by()
        assert model.streamer.ring.passes == 3


@case(4, "cache forced hit: DLO SP4")
def forced_hit(at: World) -> None:
    with groups_of(at, DLO_SP4) as groups, streamed(at.folder, "plain", groups) as model:
        resident = aligned(load(at.folder, "plain", groups))
        with always_caching(resident, FORCED) as steps:
            want = solve(resident, STEPS)
        model.streamer.is_immediate = True
        for _ in range(2):
            with Counts(model) as counts, cached(model.block, FORCED, STEPS) as cache:
                assert largest_error(solve(model, STEPS), want) == 0.0
                assert list(cache.report(groups.replica).cached_steps) == steps
            assert counts.of == [8, 3, 3, 3]
        model.streamer.is_immediate = False
        assert largest_error(solve(model, STEPS), solve(resident, STEPS)) == 0.0


# ---- the start: all or none


@case(4, "DP4: other weights on one rank are refused by all")
def different_weights(at: World) -> None:
    """`plain` and `other` have equal names and shapes."""
    folder = at.folder / ("other" if at.rank == 3 else "plain")
    with groups_of(at, DP4) as groups:  # noqa: SIM117 - the groups outlive the refusal
        with pytest.raises(EngineFailure, match=r"block 0 .* differ between the ranks"):
            load_streamed(folder, CONFIGS["plain"], Streaming(), groups=groups)


@case(4, "DP2SP2: a rank that cannot load stops all")
def failed_load(at: World) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on this rank")

    with groups_of(at, DP2SP2) as groups:
        broken = mock.patch.object(module.Masters, "lock", full) if at.rank == 2 else mock.patch.dict({}, {})
        with broken, pytest.raises((OSError, EngineError)) as refused:
            load_streamed(at.folder / "plain", CONFIGS["plain"], Streaming(), groups=groups)
        wanted = "no space left on this rank" if at.rank == 2 else "loading failed on rank 2"
        assert wanted in str(refused.value)


@case(4, "defect 07: a shutdown asks no peer")
def lonely_close(at: World) -> None:
    with groups_of(at, DP4) as groups:
        model = load_streamed(at.folder / "plain", CONFIGS["plain"], Streaming(), groups=groups)
        predict(model)
        with mock.patch.object(
            type(groups.weights), "gather_into", side_effect=AssertionError("a collective")
        ):
            model.streamer.close()


@case(4, "defect 06: a start enters no gather")
def quiet_start(at: World) -> None:
    """Ranks own different networks, so their first common pass is where gathers begin."""
    with (
        groups_of(at, DP4) as groups,
        mock.patch.object(type(groups.weights), "gather_into", side_effect=AssertionError("a collective")),
    ):
        model = load_streamed(at.folder / "plain", CONFIGS["plain"], Streaming(), groups=groups)
        assert [slot.holds for slot in model.streamer.ring._slots] == [None, None]


# ---- mutations


@case(4, "mutation: a share is cut before the rank's own part is taken")
def early_cut(at: World) -> None:
    """Each replica then has another slice of the experts: refused by digest, and wrong without it."""
    with groups_of(at, DP2SP2) as groups:
        moved = replace(groups, ep=replace(groups.ep, position=(groups.ep.position + groups.dp.position) % 2))
        with mock.patch.object(
            module, "distribute", lambda model, _, **kw: distribute_as(model, groups, moved, kw)
        ):
            with pytest.raises(EngineFailure, match="differ between the ranks"):
                load_streamed(at.folder / "plain", CONFIGS["plain"], Streaming(), groups=groups)
            with (
                mock.patch.object(module, "agree_on_weights"),
                streamed(at.folder, "plain", groups) as model,
            ):
                found = gathered_tensors(model)
        want = load(at.folder, "plain", groups).state_dict()
        same = [torch.equal(tensor, want[key]) for key, tensor in found.items() if "moe_mlp" in key]
        assert not all(same)


def distribute_as(model: Magi2Transformer, groups: Groups, moved: Groups, kw: dict[str, str]) -> object:
    own = DISTRIBUTE(model, moved, **kw)
    for part in model.modules():
        if hasattr(part, "groups"):
            part.groups = groups
    return own


DISTRIBUTE = module.distribute


# ---- waves of the whole engine

FEW_TOKENS = Tier("272p", 128, 64, 4)
PROMPTS = ("a red kite over the sea", "rain on a tin roof", "a slow train at night", "two dogs in the snow")


def requests(steps: int) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, "272p", steps, seed=seed) for seed, prompt in enumerate(PROMPTS)]


class Dropping:
    """Drops slots before a step."""

    def __init__(self, slots: set[int], step: int, *, ends: bool = False) -> None:
        self._slots, self._step, self._ends, self._asked = frozenset(slots), step, ends, -1

    def __call__(self) -> bool:
        self._asked += 1
        return self._ends and self._asked >= self._step

    def dropped(self) -> frozenset[int]:
        return self._slots if self._asked >= self._step else frozenset()


def same(a: Rendered, b: Rendered) -> bool:
    return torch.equal(a.clip.frames, b.clip.frames) and torch.equal(a.clip.samples, b.clip.samples)


def alone(engine: EngineConfig, request: GenerationRequest) -> Rendered:
    pipeline = Magi2Pipeline(engine)
    try:
        return pipeline(request)
    finally:
        pipeline.close()


@case(2, "wave: DP2 with the tiny engine")
def tiny_wave(at: World) -> None:
    """One of two, dropped in the middle, failed, ended, full again: no clip changes."""
    engine = EngineConfig(at.folder / "tiny")
    first, second = requests(2)[:2]
    with mock.patch.dict(TIERS, {"272p": FEW_TOKENS}), groups_of(at, DP2) as groups:
        want = alone(engine, (first, second)[at.rank])
        pipeline = Magi2Pipeline(engine, groups=groups)
        both = [Member(first), Member(second)]
        lone = render_wave(pipeline, [Member(first), None])
        assert same(lone, want) if at.rank == 0 else lone is None
        outcome = render_wave(pipeline, both, signal=Dropping({1}, 1))
        assert same(outcome, want) if at.rank == 0 else isinstance(outcome, Stopped)
        broken = [Member(replace(first, has_image=True)), Member(second)]  # there is no image
        outcome = render_wave(pipeline, broken)
        assert same(outcome, want) if at.rank == 1 else "image" in str(outcome)
        ended = render_wave(pipeline, both, signal=Dropping(set(), 1, ends=True))
        assert isinstance(ended, Stopped)
        for unequal in ([Member(first), Member(replace(second, num_inference_steps=3))], [Member(first)]):
            with pytest.raises(EngineError, match="wave"):
                render_wave(pipeline, unequal)
        assert same(render_wave(pipeline, both), want)
        pipeline.close()


@case(2, "wave: an engine that fails in one slot")
def failing_wave(at: World) -> None:
    engine = EngineConfig(at.folder / "tiny")
    first, second = requests(2)[:2]
    with mock.patch.dict(TIERS, {"272p": FEW_TOKENS}), groups_of(at, DP2) as groups:
        want = alone(engine, second) if at.rank == 1 else None
        pipeline = Magi2Pipeline(engine, groups=groups)
        inner, calls = pipeline.transformer.block.layers[2].layer, []
        forward = inner.forward

        def fail(*args: object) -> Tensor:
            calls.append(args)
            if len(calls) == 2:  # in the middle of the second step
                raise EngineError("of this request alone")
            return forward(*args)

        if at.rank == 0:
            inner.forward = fail
        outcome = render_wave(pipeline, [Member(first), Member(second)])
        if at.rank == 0:
            assert str(outcome) == "of this request alone"
        else:
            assert same(outcome, want)
        pipeline.close()


@case(4, "wave: DP4 with 3 of 4 slots and a cancel in mid-wave")
def wave_of_three(at: World) -> None:
    engine = EngineConfig(at.folder / "tiny")
    with mock.patch.dict(TIERS, {"272p": FEW_TOKENS}), groups_of(at, DP4) as groups:
        want = alone(engine, requests(2)[at.rank]) if at.rank in (0, 3) else None
        pipeline = Magi2Pipeline(engine, groups=groups)
        members = [None if slot == 1 else Member(request) for slot, request in enumerate(requests(2))]
        outcome = render_wave(pipeline, members, signal=Dropping({2}, 1))
        pipeline.close()
        if at.rank == 1:
            assert outcome is None
        elif at.rank == 2:
            assert isinstance(outcome, Stopped)
        else:
            assert same(outcome, want)


@case(4, "wave: DP2SP2, slots by data-parallel place")
def wave_of_pairs(at: World) -> None:
    """Peers of a replica take the same request; only its first rank has the clip."""
    engine = EngineConfig(at.folder / "tiny")
    pair = requests(2)[:2]
    with mock.patch.dict(TIERS, {"272p": FEW_TOKENS}), groups_of(at, DP2SP2) as groups:
        pipeline = Magi2Pipeline(engine, groups=groups)
        members = [Member(request) for request in pair]
        first = render_wave(pipeline, members)
        lone = render_wave(pipeline, [None, members[1]])
        dropped = render_wave(pipeline, members, signal=Dropping({0}, 1))
        pipeline.close()
        if at.rank in (1, 3):
            assert first is None
        assert (lone is None) == (at.rank != 2)
        if at.rank < 2:
            assert isinstance(dropped, Stopped)
        if at.rank == 2:
            assert same(first, lone)
