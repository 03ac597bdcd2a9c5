"""Layout of flats, shares and digests."""

import torch

from magi2.offload.flats import ALIGN_BYTES, Need, digest, plan_piece, read_stamp, share, stamp

NEEDS = {
    "a": Need((3, 7), torch.bfloat16),
    "b": Need((5,), torch.float32),
    "c": Need((2, 2, 2), torch.bfloat16),
    "d": Need((), torch.float32),
}


def test_defect_04_dtypes_never_share_a_flat() -> None:
    piece = plan_piece(300, 4, NEEDS)
    names = {flat.dtype: [record.name for record in flat.records] for flat in piece.flats}
    assert names == {torch.bfloat16: ["a", "c"], torch.float32: ["b", "d"]}


def test_every_tensor_lies_once_aligned_and_apart() -> None:
    piece = plan_piece(300, 4, NEEDS)
    for flat in piece.flats:
        ends = ALIGN_BYTES // flat.dtype.itemsize
        for record in flat.records:
            assert record.offset * flat.dtype.itemsize % ALIGN_BYTES == 0
            assert record.offset >= ends
            ends = record.offset + record.numel
        assert flat.numel >= ends
        buffer = torch.zeros(flat.numel + 9, dtype=flat.dtype)
        stamp(buffer, piece.number)
        for name, view in flat.views(buffer):
            assert tuple(view.shape) == NEEDS[name].shape
            view.fill_(1)
        assert read_stamp(buffer) == 300


def test_shares_are_equal_and_join_to_the_whole() -> None:
    whole = torch.arange(1, 11)
    shares = [share(whole, 4, part) for part in range(4)]
    assert {len(part) for part in shares} == {3}
    assert torch.cat(shares).tolist() == [*range(1, 11), 0, 0]


def test_digest_sees_a_changed_and_a_moved_value() -> None:
    whole = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    changed, moved = whole.clone(), whole.clone()
    changed[77] += 1e-3
    moved[[5, 900]] = whole[[900, 5]]
    digests = {digest(whole), digest(changed), digest(moved)}
    assert len(digests) == 3
    assert digest(whole.clone()) == digest(whole)
    assert all(-(2**63) <= value < 2**63 for value in digests)
