"""Every case that the layouts must pass has a test of its name: a missing one fails here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Collecting imports torch, on whatever cores there are.
pytestmark = pytest.mark.timeout(600)
FOLDERS = (
    "tests/multiprocess",
    "tests/unit/magi2/parallel",
    "tests/unit/magi2/sampling/test_cache.py",
    "tests/unit/magi2/checkpoint/test_load_streamed.py",
)
# Cases of one process have a test function each.
LAYERWISE = {
    "test_streamed_equals_resident",
    "test_rings_of_any_length_and_pieces_of_any_size",
    "test_skipped_layer_is_fetched_when_it_is_next_entered",
}
TABLE = """
SP4
SP2
SP4 with EP2
TP4
TP2SP2
CFG2SP2
golden full forwards SP2
golden full forwards SP4
golden full forwards TP2 refused
SP2 with 3 MoE heads
SP4 with 3 MoE heads and 12 attention heads
HSDP4+SP4
HSDP4+CFG2SP2
DP4
DP2SP2
DLO SP4 rank-local
wave: DP4 with 3 of 4 slots and a cancel in mid-wave
VAE PP4
VAE PP2
cache forced hit: resident
cache forced hit: SP4
cache forced hit: CFG2SP2
cache forced hit: DLO SP4
rank dies
rank raises
rank stalls
refusal table
rank and group table
groups: SP8
groups: TP2SP4
groups: TP4SP2
groups: CFG2SP4
groups: DP2SP4
SP8 one forward
TP8 refused
mutation: shifting a split by one
mutation: swapping sinks
mutation: a share is cut before the rank's own part is taken
wave: DP2SP2, slots by data-parallel place
"""


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Return the functions and the ids of all collected tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *FOLDERS]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tests = re.findall(r"^tests/\S+::(\w+)(?:\[(.+)\])?$", found.stdout, flags=re.MULTILINE)
    return {name for test in tests for name in test if name}


def test_every_case_of_the_table_is_collected(collected: set[str]) -> None:
    # A table of its own has a test for each row: `refusal table: cfg-3`.
    missing = [
        name
        for name in TABLE.strip().splitlines()
        if not any(re.match(rf"{re.escape(name)}(: |$)", own) for own in collected)
    ]
    assert missing == []
    assert collected >= LAYERWISE


def test_a_case_that_is_not_there_would_be_noticed(collected: set[str]) -> None:
    assert "SP4 with EP2" in collected
    assert "SP4 with EP7" not in collected
