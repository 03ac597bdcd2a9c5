"""The name `kernels` is also a PyPI package that transformers looks for: four rules keep both apart."""

import importlib.metadata
import tomllib

import kernels
from tests.architecture.tree import text_of

PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]


def test_distribution_version_is_outside_what_transformers_probes() -> None:
    major, minor = (int(part) for part in PROJECT["version"].split(".")[:2])
    assert not (major == 0 and 10 <= minor <= 19)


def test_the_other_kernels_package_is_never_a_dependency() -> None:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    named = [entry for entries in lists for entry in entries if entry.lower().startswith("kernels")]
    assert named == []


def test_package_attribute_is_not_the_distribution_version() -> None:
    assert kernels.__version__ == "0.0"
    assert kernels.__version__ != PROJECT["version"]


def test_text_tower_imports_beside_our_kernels() -> None:
    from transformers import Qwen3_5TextModel  # slow: pulls torch

    assert Qwen3_5TextModel is not None
    owners = importlib.metadata.packages_distributions().get("kernels", [])
    assert set(owners) <= {"magi2-farm"}
