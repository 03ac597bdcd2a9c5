"""Sizes of modules and functions, and how often a check is silenced."""

import ast
import re
import statistics

import pytest

from tests.architecture.tree import Function, files, modules

MODULE_LIMIT = 600
SILENCED = re.compile(r"#\s*(?:noqa|type:\s*ignore)(?P<rest>.*)")
# The rule in question first, then "-" or "#" and the reason.
WITH_CODE_AND_REASON = re.compile(
    r"^(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|\[[a-z-]+(?:,\s*[a-z-]+)*\])\s*(?:--?|#)\s*\S+"
)


def lines_of(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_no_module_is_longer_than_the_limit() -> None:
    long = {module.path: module.num_lines for module in modules() if module.num_lines > MODULE_LIMIT}
    assert long == {}


@pytest.mark.parametrize(
    "packages", [("kernels", "magi2"), ("farm", "api", "worker")], ids=["engine", "service"]
)
def test_functions_stay_short(packages: tuple[str, ...]) -> None:
    lengths = sorted(lines_of(function) for module in modules(*packages) for function in module.functions())
    assert statistics.median(lengths) <= 12
    assert lengths[int(len(lengths) * 0.9)] <= 40
    assert sum(length > 50 for length in lengths) <= 0.06 * len(lengths)


def test_functions_take_at_most_eight_arguments() -> None:
    found = []
    for module in modules():
        for function in module.functions():
            # A device kernel has no objects to take its pointers and strides from.
            if any(ast.unparse(decorator).endswith(".jit") for decorator in function.decorator_list):
                continue
            spec = function.args
            names = [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > 8:
                found.append(f"{module.path}:{function.lineno} {function.name}")
    assert found == []


def test_silenced_checks_are_rare_and_say_why() -> None:
    sources = [module.source.splitlines() for module in modules()]
    hits = [match["rest"] for lines in sources for line in lines if (match := SILENCED.search(line))]
    assert [rest for rest in hits if not WITH_CODE_AND_REASON.match(rest)] == []
    assert len(hits) <= max(2, 2 * sum(map(len, sources)) / 1000)


def test_no_module_is_a_drawer() -> None:
    drawers = re.compile(r"(^|/)(utils?|commons?|helpers?|misc)\.py$")
    assert [path for path in files() if drawers.search(path)] == []


def test_every_module_opens_with_what_it_is() -> None:
    silent = [module.path for module in modules() if not module.source.startswith(('"""', 'r"""'))]
    assert silent == []
