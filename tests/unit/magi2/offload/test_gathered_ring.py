"""A ring whose ranks keep a share each; the peer is played, real peers are in the multiprocess tier."""

import pytest
import torch
from torch import Tensor

from magi2.offload.flats import plan_piece, read_stamp, share, stamp
from magi2.offload.runtime import Stream
from magi2.parallel.groups import Group
from tests.unit.magi2.offload.test_ring import SEEDS, passes_are_right
from tests.unit.magi2.offload.toys import WIDTHS, Forgetful, Need, make, weights_of


class PlayedPeer(Group):
    """The first of two ranks, with the other's shares at hand."""

    def gather_into(self, out: Tensor, part: Tensor) -> None:
        assert out.numel() == 2 * part.numel(), "the collective checks sizes"
        number = read_stamp(part)
        if not 0 <= number < len(WIDTHS):  # bytes of no piece
            out.fill_(torch.nan)
            return
        own = weights_of(number, WIDTHS[number])
        piece = plan_piece(number, number, {n: Need(tuple(t.shape), t.dtype) for n, t in own.items()})
        [flat] = [flat for flat in piece.flats if flat.dtype is part.dtype]
        if flat.share_numel(2) != part.numel():  # bytes of another piece: let the stamp tell
            out.fill_(torch.nan)
            return
        whole = torch.zeros(flat.numel, dtype=flat.dtype)
        stamp(whole, number)
        for name, view in flat.views(whole):
            view.copy_(own[name])
        out.copy_(torch.cat([part, share(whole, 2, 1)]))


PAIR = PlayedPeer("weights", (0, 1), 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_defect_02_gather_output_is_cut_to_the_shares_of_the_piece(seed: int) -> None:
    assert passes_are_right(make(seed=seed, group=PAIR))


@pytest.mark.parametrize("stream", list(Stream))
def test_forgotten_wait_is_noticed(stream: Stream) -> None:
    assert not all(passes_are_right(make(runtime=Forgetful(stream, seed=seed), group=PAIR)) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_without_computing_keep_the_ring_in_step(seed: int) -> None:
    toy = make(seed=seed, group=PAIR)
    toy.ring.pass_by()
    assert toy.ring.passes == 1
    assert passes_are_right(toy, count=1)
    toy.ring.run(0, lambda: None)
    toy.ring.pass_by()
    assert (toy.ring.passes, toy.ring.is_between_passes) == (3, True)
    assert passes_are_right(toy, count=1)


def test_device_holds_two_slots_and_two_shares() -> None:
    ring = make(group=PAIR).ring
    for slot in ring._slots:
        for dtype, flat in slot.flats.items():
            assert flat.numel() == 2 * slot.shares[dtype].numel()
