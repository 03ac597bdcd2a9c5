"""The ring on the host's shuffled streams: right bytes in every order, and every missing wait noticed."""

import pytest
import torch

from magi2.errors import EngineError
from magi2.offload.runtime import Stream
from tests.unit.magi2.offload.toys import WIDTHS, Forgetful, Toy, make

SEEDS = range(12)


def passes_are_right(toy: Toy, count: int = 3) -> bool:
    try:
        return all(
            all(torch.equal(a, b) for a, b in zip(toy.one_pass(), toy.wanted(), strict=True))
            for _ in range(count)
        )
    except EngineError:  # a stamp of another piece
        return False


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_slots", [2, 3])
def test_every_piece_computes_on_its_own_bytes_in_any_order(seed: int, num_slots: int) -> None:
    assert passes_are_right(make(seed=seed, num_slots=num_slots))


@pytest.mark.parametrize("stream", [Stream.COMPUTE, Stream.COPY])
def test_forgotten_wait_is_noticed(stream: Stream) -> None:
    assert not all(passes_are_right(make(runtime=Forgetful(stream, seed=seed))) for seed in SEEDS)


@pytest.mark.parametrize("widths", [(9, 4, 7), (9, 4, 7, 300, 2), (9, 4)])
def test_defect_01_odd_ring_never_has_head_and_tail_in_one_slot(widths: tuple[int, ...]) -> None:
    toy = make(widths, seed=3)
    assert passes_are_right(toy, count=5)
    held = [slot.holds for slot in toy.ring._slots]
    assert len(set(held)) == len(held)


def test_defect_03_slots_of_another_ring_are_never_overwritten() -> None:
    first, second = make(seed=1), make((40, 3, 8), seed=2)
    assert passes_are_right(first, count=1)
    assert passes_are_right(second, count=1)
    assert passes_are_right(first, count=1)
    buffers = {b.data_ptr() for toy in (first, second) for s in toy.ring._slots for b in s.flats.values()}
    assert len(buffers) == 2 * 2 * 2


def test_order_is_shuffled_and_repeated_by_its_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        toy = make(seed=seed)
        toy.one_pass()
        orders.append(toy.runtime.order)
    assert orders[0] == orders[1] != orders[2]


def test_at_most_one_piece_is_bound_and_none_after_its_work() -> None:
    toy = make()
    seen = []

    def look() -> None:
        seen.append([sum(t.numel() for t in targets.values()) > 0 for targets in toy.targets])

    for place in range(toy.ring.size):
        toy.ring.run(place, look)
    toy.runtime.settle()
    assert [bound.index(True) for bound in seen] == list(range(toy.ring.size))
    assert all(sum(bound) == 1 for bound in seen)
    assert all(t.numel() == 0 for targets in toy.targets for t in targets.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("places", [[0, 3], [0, 0, 0], [0, 2, 4], [4, 3, 1, 0], [0]])
def test_piece_that_was_not_brought_is_fetched_on_entry(seed: int, places: list[int]) -> None:
    toy = make(seed=seed)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(toy.one_pass(places), toy.wanted(places), strict=True))
    assert passes_are_right(toy, count=1)


def test_buffers_are_made_once() -> None:
    toy = make()
    before = [slot.flats[dtype].data_ptr() for slot in toy.ring._slots for dtype in slot.flats]
    toy.one_pass()
    toy.one_pass()
    assert [slot.flats[dtype].data_ptr() for slot in toy.ring._slots for dtype in slot.flats] == before
    assert toy.ring.nbytes == sum(t.nbytes for slot in toy.ring._slots for t in slot.flats.values())


def test_failed_work_leaves_a_ring_that_finishes_its_pass() -> None:
    toy = make()

    def fail() -> None:
        raise EngineError("of one piece")

    toy.ring.run(0, fail)
    toy.ring.run(1, lambda: None)
    with pytest.raises(EngineError, match="of one piece"):
        toy.ring.pass_by()
    assert toy.ring.is_between_passes
    assert passes_are_right(toy)


def test_bytes_of_another_piece_are_refused_by_their_stamp() -> None:
    toy = make(widths=WIDTHS)
    toy.masters.of(2)[torch.float32].copy_(torch.cat([toy.masters.of(1)[torch.float32][:64]] * 100)[:192])
    with pytest.raises(EngineError, match="piece 2 was about to run on the bytes of piece 1"):
        toy.one_pass()


def test_closed_ring_holds_nothing_and_enters_nothing() -> None:
    toy = make()
    toy.ring.run(0, lambda: None)
    toy.ring.close()
    toy.runtime.settle()
    assert all(t.numel() == 0 for targets in toy.targets for t in targets.values())


@pytest.mark.parametrize(("widths", "num_slots"), [((3,), 2), ((3, 4), 1)])
def test_ring_of_one_is_refused(widths: tuple[int, ...], num_slots: int) -> None:
    with pytest.raises(EngineError, match="a ring needs two pieces and two slots"):
        make(widths, num_slots=num_slots)
