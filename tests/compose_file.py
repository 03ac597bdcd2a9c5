"""`compose.yaml` as its own parser reads it, variables filled in: the one source of commands for tests."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMPOSE = Path(sys.executable).with_name("docker-compose")
PROFILES = ("cpu", "gpu", "dlo-sp4", "dlo-dp4")


def parse(*profiles: str, file: Path = ROOT / "compose.yaml") -> subprocess.CompletedProcess[str]:
    """Run the parser; it tells of unknown keys, missing services and missing variables on stderr."""
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    command = [str(COMPOSE), "-f", str(file), *chosen, "config", "--format", "json"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"HOME": "/", "PATH": "/usr/bin:/bin"}
    )


@functools.cache
def model() -> dict[str, Any]:
    """Return the whole file, with the services of all profiles."""
    parsed = parse(*PROFILES)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    found: dict[str, Any] = json.loads(parsed.stdout)
    return found


def services() -> dict[str, Any]:
    """Return the services by name."""
    found: dict[str, Any] = model()["services"]
    return found


def seconds(text: str) -> float:
    """Read a duration such as `21m30s`."""
    total, number = 0.0, ""
    for letter in text:
        if letter.isdigit() or letter == ".":
            number += letter
        else:
            total += float(number) * {"h": 3600, "m": 60, "s": 1}[letter]
            number = ""
    return total
