"""The script that draws the secrets of compose.yaml."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.compose_file import ROOT, model


def test_secrets_are_drawn_once_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    command = [sys.executable, "deploy/make_secrets.py", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    subprocess.run(command, cwd=ROOT, check=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    assert folder.stat().st_mode & 0o077 == 0
    assert first["postgres_password"] in first["database_url"]
    [identity] = json.loads(first["s3_identities"])["identities"]
    assert identity["credentials"][0]["secretKey"] == first["s3_secret_key"]
    assert {f"./secrets/{name}" for name in first} == {
        found["file"].replace(str(ROOT), ".") for found in secrets_of_the_file().values()
    }


def test_half_a_set_of_secrets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key_pepper").write_text("kept")
    command = [sys.executable, "deploy/make_secrets.py", str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "key_pepper" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["key_pepper"]


def secrets_of_the_file() -> dict[str, Any]:
    found: dict[str, Any] = model()["secrets"]
    return found
