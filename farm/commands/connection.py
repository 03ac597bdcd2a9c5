"""The options that name a farm and a key, and what stands for them: the embedded farm of the state folder."""

import argparse
from pathlib import Path

from farm.commands.exits import CommandError, Exit
from farm.embedded.state import Access, StateDirectory
from farm.settings import Settings, environment, load_settings

ROOT = Path(__file__).resolve().parents[2]
# In the clone, wherever one stands; where the package was installed without one, in the current folder.
DEFAULT_STATE = (ROOT if (ROOT / "magi2-farm").is_file() else Path()) / ".state"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare `--url` and `--key-file`."""
    parser.add_argument("--url", help="address of the farm (default: the one that `magi2-farm up` started)")
    parser.add_argument("--key-file", type=Path, help="file that holds the API key (default: likewise)")


def state_path() -> Path:
    """Return the state folder of embedded mode: FARM_STATE_DIR, or `.state` in the clone."""
    return Path(environment().get("FARM_STATE_DIR") or DEFAULT_STATE)


def embedded_variables() -> dict[str, str]:
    """Return the settings of the embedded farm, where nothing else says which database is meant."""
    path, given = state_path(), environment()
    if given.get("DATABASE_URL") or given.get("DATABASE_URL_FILE") or not path.is_dir():
        return {}
    return StateDirectory(path).variables() or {}


def effective_settings() -> Settings:
    """Load the settings of the environment, or of the embedded farm if it is the one that is meant."""
    return load_settings(overrides=embedded_variables())


def remedy(variable: str) -> str:
    """Say what to do about a server that does not answer: start the embedded farm, or check a variable."""
    if embedded_variables():
        return f"start the embedded farm of {state_path()} with ./magi2-farm up"
    return f"check {variable} and that the server runs"


def access_of(arguments: argparse.Namespace) -> Access:
    """Return URL and key for a command.

    Raises:
        CommandError: Neither given nor kept by embedded mode.
    """
    path = state_path()
    kept = StateDirectory(path).access() if path.is_dir() else None
    url = arguments.url or (kept.url if kept else None)
    key = _key_in(arguments.key_file) if arguments.key_file else (kept.key if kept else None)
    if url is None or key is None:
        raise CommandError(
            f"no farm is known here ({path} has none); start one with `magi2-farm up`, "
            "or name it with --url and --key-file",
            Exit.USAGE,
        )
    return Access(url, key)


def _key_in(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise CommandError(f"--key-file {path} cannot be read: {error.strerror}", Exit.USAGE) from None
