"""The golden folder holds nothing that no test reads, and at least one case."""

from pathlib import Path

from tests.golden import test_dit, test_packing, test_pipeline, test_vae
from tests.golden.discovery import strangers, unclaimed

SETS = {"dit": [test_dit], "vae": [test_vae], "pipeline": [test_pipeline, test_packing]}


def test_golden_folder_exists_and_holds_only_known_sets(golden_dir: Path) -> None:
    assert golden_dir.is_dir()
    assert strangers(golden_dir, SETS) == []


def test_every_golden_file_is_recognised(golden_dir: Path) -> None:
    for name, modules in SETS.items():
        patterns = [pattern for module in modules for pattern in module.FILES]
        assert [str(p) for p in unclaimed(golden_dir, name, patterns)] == []


def test_at_least_one_golden_case_exists(golden_dir: Path) -> None:
    modules = [module for group in SETS.values() for module in group]
    assert sum(len(values) for module in modules for values in module.golden_cases(golden_dir).values()) > 0
