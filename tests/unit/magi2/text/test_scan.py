"""The running sum of fixed order, alone and inside the text tower."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from magi2.text.qwen35 import TextEncoder
from magi2.text.scan import FixedOrderScan, running_sum
from tests import tolerances

TEXT = "A tea seller pours one cup and a dog barks once. " * 5


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_running_sum_equals_cumsum(dim: int) -> None:
    x = torch.randint(-9, 9, (3, 4, 65), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(running_sum(x, dim), x.cumsum(dim))


def test_infinite_value_does_not_reach_the_positions_before_it() -> None:
    got = running_sum(torch.tensor([1.0, 2.0, float("-inf"), 4.0]), 0)
    assert got.tolist() == [1.0, 3.0, float("-inf"), float("-inf")]


@pytest.mark.parametrize(
    "call", [lambda x: x.cumsum(dim=1), lambda x: torch.cumsum(x, 1), lambda x: x.cumsum(1)]
)
def test_mode_replaces_every_spelling_of_a_floating_cumsum(
    monkeypatch: pytest.MonkeyPatch, call: object
) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr("magi2.text.scan.running_sum", lambda x, dim: seen.append(x) or running_sum(x, dim))
    x = torch.arange(6.0).reshape(2, 3)
    with FixedOrderScan():
        assert torch.equal(call(x), x.cumsum(1))  # type: ignore[operator]
        torch.arange(4).cumsum(0)
    assert len(seen) == 2


@pytest.mark.usefixtures("strict")
def test_tower_in_strict_mode_sums_in_fixed_order_and_agrees(
    tower: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "magi2.text.scan.running_sum", lambda x, dim: calls.append(tuple(x.shape)) or running_sum(x, dim)
    )
    got = tower.encode(TEXT).features
    assert len(calls) == 5  # of the tower's six layers five are gated delta rules
    assert torch.equal(got, tower.encode(TEXT).features)
    torch.use_deterministic_algorithms(mode=False)
    torch.testing.assert_close(got, tower.encode(TEXT).features, **tolerances.TEXT_FEATURES_FP32)
