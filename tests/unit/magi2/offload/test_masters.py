"""Masters in page-locked memory, and what happens where the driver does not lock."""

import pytest
import torch

from magi2.offload import masters as masters_module
from magi2.offload.lazy import HostRuntime
from tests.unit.magi2.offload.test_ring import passes_are_right
from tests.unit.magi2.offload.toys import make


@pytest.mark.parametrize("seed", range(8))
def test_refused_page_locks_fall_back_to_two_bounded_buffers(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(masters_module, "STAGING_BYTES", 256)  # far smaller than a piece
    toy = make(runtime=HostRuntime(seed=seed, registers=False))
    assert toy.masters.is_staged
    assert [buffer.nbytes for buffer in toy.masters._staging] == [256, 256]
    assert passes_are_right(toy)


def test_one_refused_lock_unlocks_the_others() -> None:
    class Third(HostRuntime):
        locked = 0

        def register(self, memory: torch.Tensor) -> bool:
            del memory
            self.locked += 1
            return self.locked < 3

        def unregister(self, memory: torch.Tensor) -> None:
            del memory
            self.locked -= 1

    runtime = Third()
    toy = make(runtime=runtime)
    assert toy.masters.is_staged
    assert runtime.locked == 1  # the refused one was never locked
    assert passes_are_right(toy)


def test_defect_13_nothing_is_copied_from_memory_that_is_neither_locked_nor_staged() -> None:
    copied = []

    class Watching(HostRuntime):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            copied.append(source.untyped_storage().data_ptr())
            super().copy(target, source)

    for registers in (True, False):
        copied.clear()
        toy = make(runtime=Watching(registers=registers))
        toy.one_pass()
        allowed = toy.masters._staging if toy.masters.is_staged else toy.masters._locked
        assert {memory.untyped_storage().data_ptr() for memory in allowed} >= set(copied)
        assert copied


def test_masters_are_of_exact_size() -> None:
    toy = make()
    assert toy.masters.nbytes == sum(piece.nbytes for piece in toy.ring._pieces)
    for piece in toy.ring._pieces:
        assert toy.masters._memory.block(piece.block, 0).nbytes == piece.nbytes
