"""The documents say what is so: links, functions, states, commands and sizes."""

import ast
import re
from pathlib import Path

import pytest

from farm.cli import make_parser
from farm.jobs.states import EDGES
from tests.architecture.tree import ROOT, files, text_of

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
HOP = re.compile(r"`([a-z0-9_/]+\.py)(?:: ([A-Za-z_.]+))?`")
EDGE = re.compile(r"^\s+(\w+|\[\*\]) --> (\w+)$", re.MULTILINE)
DOCUMENTS = [path for path in files() if path.endswith(".md") and not path.startswith("tests/golden")]


def slug(heading: str) -> str:
    """Return the anchor that a heading gets on the usual forges."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    broken = []
    for target, anchor in LINK.findall(text_of(document)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (ROOT / document).parent / target
        if not path.exists():
            broken.append(target)
        elif anchor and slug(anchor[1:]) not in {
            slug(line.lstrip("#")) for line in path.read_text().splitlines() if line.startswith("#")
        }:
            broken.append(target + anchor)
    assert broken == []


def test_readme_is_short_and_starts_with_the_two_commands() -> None:
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= 200
    commands = re.findall(r"^(?:\./|\$ )\S.*$", readme, re.MULTILINE)
    assert [line.split("#")[0].strip() for line in commands[:2]] == ["./magi2-farm demo", "./magi2-farm test"]


def defined_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def hops() -> list[tuple[str, str]]:
    section = text_of("docs/architecture.md").split("## One job in twelve hops")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == 12
    return [hop for row in rows for hop in HOP.findall(row)]


@pytest.mark.parametrize(("path", "name"), hops())
def test_each_hop_names_code_that_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file()
    assert not name or name in defined_names(ROOT / path)


def test_pictured_state_machine_is_the_one_in_the_code() -> None:
    drawn = {(a, b) for a, b in EDGE.findall(text_of("docs/architecture.md")) if a != "[*]"}
    assert drawn == {(str(a), str(b)) for a, targets in EDGES.items() for b in targets}


def test_first_decisions_are_recorded_on_one_page_each() -> None:
    records = sorted(path for path in files() if path.startswith("docs/adr/"))
    assert [Path(path).name[:4] for path in records[:8]] == [f"{number:04d}" for number in range(1, 9)]
    for record in records:
        text = text_of(record)
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences", "Alternatives"))
        assert len(text.splitlines()) <= 60


def test_documented_commands_exist() -> None:
    [subcommands] = [action for action in make_parser()._actions if action.dest == "command"]
    known = set(subcommands.choices) | {"setup"}
    used = {
        (document, command)
        for document in DOCUMENTS
        for command in re.findall(r"(?:^|`|\s)(?:\./)?magi2-farm ([a-z]+)", text_of(document))
    }
    assert {(document, command) for document, command in used if command not in known} == set()


def test_every_make_target_says_what_it_does() -> None:
    targets = re.findall(r"^([a-z0-9-]+):(.*)$", text_of("Makefile"), re.MULTILINE)
    assert [name for name, rest in targets if "##" not in rest] == []
    phony = re.search(r"^\.PHONY: (.*)$", text_of("Makefile"), re.MULTILINE)
    assert phony is not None
    assert sorted(phony[1].split()) == sorted(name for name, _ in targets)
