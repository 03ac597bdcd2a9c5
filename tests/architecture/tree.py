"""The repository as the architecture tests see it: tracked and new files, and parsed modules."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "magi2", "farm", "api", "worker", "migrations")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file of the product."""

    path: str
    source: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def name(self) -> str:
        """Dotted import name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    def functions(self) -> Iterator[Function]:
        """Return every function and method."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Return every import as (statement, dotted module name)."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def files() -> tuple[str, ...]:
    """Return the paths that are tracked or would be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(path for path in listed.split("\0") if path and (ROOT / path).is_file())


def modules(*packages: str) -> list[Module]:
    """Return the Python modules of some packages; of the whole product by default."""
    wanted = packages or PACKAGES
    return [
        Module(path, (ROOT / path).read_text())
        for path in files()
        if path.endswith(".py") and path.split("/")[0] in wanted
    ]


def text_of(path: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / path).read_text()
