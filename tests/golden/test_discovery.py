"""The golden folder holds nothing that no test reads, and at least one case."""

from pathlib import Path

from tests.golden import test_dit, test_pipeline, test_vae
from tests.golden.discovery import strangers, unclaimed

SETS = {"dit": test_dit, "vae": test_vae, "pipeline": test_pipeline}


def test_golden_folder_exists_and_holds_only_known_sets(golden_dir: Path) -> None:
    assert golden_dir.is_dir()
    assert strangers(golden_dir, SETS) == []


def test_every_golden_file_is_recognised(golden_dir: Path) -> None:
    assert [str(p) for name, module in SETS.items() for p in unclaimed(golden_dir, name, module.FILES)] == []


def test_at_least_one_golden_case_exists(golden_dir: Path) -> None:
    assert sum(len(values) for module in SETS.values() for values in module.golden_cases(golden_dir).values()) > 0
