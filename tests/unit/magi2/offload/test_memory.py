"""Running out of memory, by the engine's own name."""

import pytest
import torch

from magi2.errors import OutOfMemory
from magi2.offload.memory import named_exhaustion

CPU = torch.device("cpu")


def test_allocation_that_the_host_refuses_is_named_with_its_size() -> None:
    with pytest.raises(OutOfMemory) as refused, named_exhaustion(CPU):
        torch.empty(2**50, dtype=torch.uint8)
    assert refused.value.needed_bytes == 2**50
    assert refused.value.free_bytes > 0
    assert "on host" in str(refused.value)


def test_python_memory_error_is_named() -> None:
    with pytest.raises(OutOfMemory), named_exhaustion(CPU):
        raise MemoryError


def test_other_failures_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes") as passed, named_exhaustion(CPU):
        raise RuntimeError("shapes differ")
    assert not isinstance(passed.value, OutOfMemory)
