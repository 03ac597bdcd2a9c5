"""Who renders what in a wave, without an engine; the engine's waves are in tests/multiprocess."""

from types import SimpleNamespace

import pytest

from magi2.contract import GenerationRequest
from magi2.errors import EngineError, InvalidInput, OutOfMemory, PeerLost, Stopped
from magi2.parallel.groups import Group, Groups
from magi2.parallel.layout import Layout
from magi2.wave import Boundary, Member, Undisturbed, render_one, render_wave

DP2SP2 = Layout(data_parallel=2, ulysses=2, dlo=True)
DP4 = Layout(data_parallel=4, dlo=True)
STEPS = 3


class PlayedRing:
    """Counts passes."""

    def __init__(self) -> None:
        self.passes, self.ghosts, self.is_between_passes = 7, 0, True

    def pass_by(self) -> None:
        self.passes += 1
        self.ghosts += 1
        self.is_between_passes = True


class PlayedPipeline:
    """Makes a pass for each step, and fails before one if told so."""

    def __init__(self, layout: Layout, rank: int, failure: Exception | None = None, at_step: int = 1) -> None:
        replica = Group("replica", tuple(range(layout.replica_size)))
        self.groups = Groups(layout, rank, replica=replica)
        self.ring = PlayedRing()
        self.transformer = SimpleNamespace(streamer=SimpleNamespace(ring=self.ring))
        self.rendered: list[str] = []
        self._failure, self._at_step = failure, at_step

    def __call__(self, request, *, before_step, **_):
        for step in range(request.num_inference_steps):
            if self._failure is not None and step == self._at_step:
                raise self._failure
            if before_step():
                raise Stopped("dropped")
            self.ring.passes += 1
        self.rendered.append(request.prompt)
        return request.prompt


def members(layout: Layout, *empty: int) -> list[Member | None]:
    return [
        None if slot in empty else Member(GenerationRequest(f"of slot {slot}", "272p", STEPS, seed=1))
        for slot in range(layout.data_parallel)
    ]


@pytest.mark.parametrize(
    ("layout", "slots"), [(DP2SP2, [0, 0, 1, 1]), (DP4, [0, 1, 2, 3])], ids=["DP2SP2", "DP4"]
)
def test_defect_09_slot_is_the_data_parallel_place_and_never_the_global_rank(
    layout: Layout, slots: list[int]
) -> None:
    taken = [render_wave(PlayedPipeline(layout, rank), members(layout)) for rank in range(4)]
    assert taken == [f"of slot {slot}" for slot in slots]


@pytest.mark.parametrize(
    "failure", [None, InvalidInput("no"), EngineError("no"), OutOfMemory(1, 2, "cuda:0"), Stopped("no")]
)
def test_every_rank_makes_as_many_passes_whatever_becomes_of_its_request(failure: Exception | None) -> None:
    for at_step in range(STEPS):
        pipeline = PlayedPipeline(DP4, 2, failure, at_step)
        outcome = render_wave(pipeline, members(DP4))
        assert outcome == ("of slot 2" if failure is None else failure)
        assert pipeline.ring.passes == 7 + STEPS or failure is not None
        # Alone in its world, nobody else lives, so the wave ends with its only request.
        assert pipeline.ring.ghosts == 0


def test_lost_peer_and_a_failure_that_peers_may_not_share_end_the_process() -> None:
    with pytest.raises(PeerLost):
        render_wave(PlayedPipeline(DP4, 0, PeerLost("gone")), members(DP4))
    with pytest.raises(OutOfMemory):
        render_wave(PlayedPipeline(DP2SP2, 0, OutOfMemory(1, 2, "cuda:0")), members(DP2SP2))


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ([None, None], "a wave of this layout has 2 slots, one or more filled .got 2 slots, 0 filled"),
        ([None], "got 1 slots"),
        (members(DP4), "got 4 slots"),
    ],
)
def test_wave_that_does_not_fill_the_layout_is_refused(slots: list[Member | None], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        render_wave(PlayedPipeline(DP2SP2, 0), slots)


def test_requests_with_other_steps_or_tier_are_refused() -> None:
    first = GenerationRequest("one", "272p", 2, seed=1)
    for other in (GenerationRequest("two", "272p", 3, seed=1), GenerationRequest("two", "540p", 2, seed=1)):
        with pytest.raises(EngineError, match="requests of one wave need equal steps and tier"):
            render_wave(PlayedPipeline(DP2SP2, 0), [Member(first), Member(other)])


def test_wave_without_streamed_weights_is_refused() -> None:
    pipeline = PlayedPipeline(DP2SP2, 0)
    pipeline.transformer.streamer = None
    with pytest.raises(EngineError, match="waves need streamed weights"):
        render_wave(pipeline, members(DP2SP2))


def test_single_request_takes_the_first_slot_and_raises_its_own_failure() -> None:
    request = GenerationRequest("alone", "272p", STEPS, seed=1)
    assert render_one(PlayedPipeline(DP2SP2, 0), request) == "alone"
    assert render_one(PlayedPipeline(DP2SP2, 2), request) is None
    with pytest.raises(InvalidInput, match="no"):
        render_one(PlayedPipeline(DP4, 0, InvalidInput("no")), request)


def test_boundary_ends_a_slot_a_wave_or_nothing() -> None:
    class Dropping(Undisturbed):
        def dropped(self) -> frozenset[int]:
            return frozenset({1})

    class Ending(Undisturbed):
        def __call__(self) -> bool:
            return True

    alone = Group("world", (0,))
    kept, dropped = Boundary(alone, 2, 0, Dropping()), Boundary(alone, 2, 1, Dropping())
    assert (kept(), kept.is_over) == (False, False)
    assert (dropped(), dropped.is_over) == (True, True)
    ended = Boundary(alone, 2, 0, Ending())
    assert (ended(), ended.is_over) == (True, True)
    idle = Boundary(alone, 2, 0, Undisturbed(), is_alive=False)
    assert (idle(), idle.is_over, idle.count) == (False, True, 1)
