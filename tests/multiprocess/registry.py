"""The cases of the tier by name and number of ranks, and what they all use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from magi2.parallel.groups import Groups, open_groups
from magi2.parallel.layout import Layout
from tests.multiprocess.spawn import CASE_TIMEOUT_S, Case, World

CASES: dict[str, Case] = {}
WORLDS: dict[int, list[str]] = {2: [], 4: [], 8: []}


def case(world: int, name: str) -> Callable[[Case], Case]:
    """Register a case under the name that its test shows."""

    def register(function: Case) -> Case:
        assert name not in CASES, f"two cases are named {name}"
        CASES[name] = function
        WORLDS[world].append(name)
        return function

    return register


@contextmanager
def groups_of(at: World, layout: Layout) -> Iterator[Groups]:
    with open_groups(layout, at.rank, timeout_s=CASE_TIMEOUT_S) as groups:
        yield groups


def largest_error(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> float:
    assert [t.shape for t in got] == [t.shape for t in want]
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
