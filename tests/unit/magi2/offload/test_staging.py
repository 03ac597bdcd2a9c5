"""Staging on shuffled host streams; on the CPU proper it is nothing, and tests/gpu prove the way to a GPU."""

import pytest
import torch
from torch import Tensor, nn

from magi2.errors import EngineError
from magi2.offload.lazy import HostRuntime
from magi2.offload.staging import Stage

CPU = torch.device("cpu")


class Aliased(nn.Module):
    """Two names for one tensor, a transposed view, a buffer, and an offset."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        self.first = nn.Parameter(base, requires_grad=False)
        self.tied = self.first
        self.turned = nn.Parameter(base.T[1:], requires_grad=False)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("empty", torch.empty(0))

    def tensors(self) -> list[Tensor]:
        return [self.first, self.tied, self.turned, self.table]


def test_staging_on_the_cpu_moves_nothing() -> None:
    module, stage = nn.Linear(2, 2), Stage(CPU)
    before = module.weight.data_ptr()
    stage.pin(module)
    with stage.holding(module):
        assert module.weight.data_ptr() == before
    assert module.weight.data_ptr() == before


@pytest.mark.parametrize("seed", range(6))
def test_staged_network_has_its_values_and_goes_back_to_its_masters(seed: int) -> None:
    module, stage = Aliased(), Stage(CPU, HostRuntime(seed=seed))
    wanted = [tensor.clone() for tensor in module.tensors()]
    strides = [(t.stride(), t.storage_offset()) for t in module.tensors()]
    stage.pin(module)
    masters = [t.data_ptr() for t in module.tensors()]
    for _ in range(2):
        with stage.holding(module):
            assert all(torch.equal(a, b) for a, b in zip(module.tensors(), wanted, strict=True))
            assert [(t.stride(), t.storage_offset()) for t in module.tensors()] == strides
            assert set(masters).isdisjoint(t.data_ptr() for t in module.tensors())
        assert [t.data_ptr() for t in module.tensors()] == masters


def test_each_storage_is_locked_and_copied_once_and_nothing_comes_back() -> None:
    copies, locked = [], []

    class Watching(HostRuntime):
        def copy(self, target: Tensor, source: Tensor) -> None:
            copies.append((target.data_ptr(), source.data_ptr()))
            super().copy(target, source)

        def register(self, memory: Tensor) -> bool:
            locked.append((memory.data_ptr(), memory.nbytes))
            return True

        def unregister(self, memory: Tensor) -> None:
            locked.remove((memory.data_ptr(), memory.nbytes))

    module, stage = Aliased(), Stage(CPU, Watching())
    stage.pin(module)
    assert sorted(nbytes for _, nbytes in locked) == [5 * 4, 24 * 4]
    with stage.holding(module):
        pass
    assert [source for _, source in copies] == [address for address, _ in locked]
    stage.close()
    assert locked == []


def test_two_networks_are_never_staged_together() -> None:
    first, second, stage = nn.Linear(2, 2), nn.Linear(2, 2), Stage(CPU, HostRuntime())
    with stage.holding(first), pytest.raises(EngineError, match="at the same time"), stage.holding(second):
        pass
    with stage.holding(second):
        pass


def test_failed_phase_takes_its_network_back() -> None:
    module, stage = nn.Linear(2, 2), Stage(CPU, HostRuntime())
    stage.pin(module)
    master = module.weight.data_ptr()
    with pytest.raises(RuntimeError, match="of the phase"), stage.holding(module):
        raise RuntimeError("of the phase")
    assert module.weight.data_ptr() == master
    with stage.holding(module):
        pass
