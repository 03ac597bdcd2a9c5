"""`tiny-checkpoint` and `verify-checkpoint`."""

from collections.abc import Callable
from pathlib import Path


def test_tiny_checkpoint_writes_a_folder_that_verifies(magi2: Callable, tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    outcome = magi2("tiny-checkpoint", root, "--seed", "5")
    assert outcome.code == 0
    assert "files" in outcome.out
    assert magi2("verify-checkpoint", root).code == 0


def test_tiny_checkpoint_keeps_what_is_there(magi2: Callable, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    outcome = magi2("tiny-checkpoint", tmp_path)
    assert outcome.code == 2
    assert "not an empty folder" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_report_lists_every_problem_and_fails(magi2: Callable, tmp_path: Path) -> None:
    outcome = magi2("verify-checkpoint", tmp_path)
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert "vae/Wan2.2_VAE.pth is missing" in lines
    assert lines[-1].endswith("10 problems")


def test_report_without_problem_succeeds(magi2: Callable, tiny_root: Path) -> None:
    outcome = magi2("verify-checkpoint", tiny_root)
    assert (outcome.code, len(outcome.out.splitlines())) == (0, 1)
    assert outcome.out.rstrip().endswith("no problem")


def test_folder_must_be_named_somewhere(magi2: Callable) -> None:
    assert magi2("verify-checkpoint").code == 2
