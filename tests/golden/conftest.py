"""Turn the files of a golden folder into test cases.

A golden test module defines `golden_cases(golden_dir) -> dict[fixture name, list of values or pytest.param]`;
every test that takes one of these fixtures runs once a value. A fixture without a value gives no test.
"""

from pathlib import Path

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    finder = getattr(metafunc.module, "golden_cases", None)
    if finder is None:
        return
    for name, values in finder(Path(metafunc.config.getoption("golden_dir"))).items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A fixture without values would be reported as skipped; no case means no test.
    empty = [
        i
        for i in items
        if any("got empty parameter set" in str(m.kwargs.get("reason", "")) for m in i.iter_markers("skip"))
    ]
    if empty:
        config.hook.pytest_deselected(items=empty)
        items[:] = [i for i in items if i not in empty]


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("golden_dir"))
