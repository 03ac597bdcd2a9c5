"""What must not be in the repository: paths of one machine, unfinished work, misspelt words."""

import re

import pytest

from tests.architecture.tree import files, modules, text_of

TEXT = (
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".mako",
    "Makefile",
    "NOTICE",
    ".ci/run",
    "magi2-farm",
)
NOT_OURS = ("tests/golden/", "tests/architecture/test_words.py")
EXAMINED = [path for path in files() if path.endswith(TEXT) and not path.startswith(NOT_OURS)]
MADE_UP_IN_TESTS = "a path of one machine"
FORBIDDEN = {
    MADE_UP_IN_TESTS: r"/(?:work|root|home/\w+|Users/\w+)/\w",
    "unfinished work": r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b",
    "a test that does not run": r"pytest\.(?:mark\.)?(?:skip|skipif|xfail|importorskip)\b",
    # Python's own names (asyncio's task.cancelled(), CancelledError) are not ours to spell.
    "canceled has one l": r"\bcancelled\b(?!\()",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_text_is_absent(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path in EXAMINED
        if not (what == MADE_UP_IN_TESTS and path.startswith("tests/"))
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_code_is_ascii() -> None:
    assert [module.path for module in modules() if not module.source.isascii()] == []
