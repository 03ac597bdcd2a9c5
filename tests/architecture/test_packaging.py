"""What is declared, pinned and shipped."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.architecture.tree import text_of

PYPROJECT = tomllib.loads(text_of("pyproject.toml"))
PROJECT = PYPROJECT["project"]
STUBS = re.compile(r"^types-")


def requirements() -> list[Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(entry) for entries in lists for entry in entries]


def pins() -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in text_of("constraints.txt").splitlines()]
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    bad = [
        str(requirement)
        for requirement in requirements()
        if canonicalize_name(requirement.name) not in pinned
        or pinned[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert bad == []


def test_supported_python_versions_are_declared() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


def test_torch_is_bounded_on_both_sides() -> None:
    specifiers = [str(entry.specifier) for entry in requirements() if entry.name == "torch"]
    assert specifiers
    assert all("<" in entry and ">=" in entry for entry in specifiers)


def test_base_install_has_no_engine() -> None:
    base = {canonicalize_name(Requirement(entry).name) for entry in PROJECT["dependencies"]}
    assert base.isdisjoint({"torch", "transformers", "diffusers", "numpy", "safetensors"})
