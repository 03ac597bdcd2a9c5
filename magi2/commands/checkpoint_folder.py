"""Where the checkpoint folder of a command comes from: named, or else from `MAGI2_CKPT_ROOT`."""

from pathlib import Path

from magi2.config import engine_environment
from magi2.errors import InvalidInput


def checkpoint_folder(given: Path | None) -> Path:
    """Return the folder that a command is about.

    Raises:
        InvalidInput: None was named, and the environment names none.
    """
    root = given or engine_environment().ckpt_root
    if root is None:
        raise InvalidInput("no checkpoint folder was given: name it, or set MAGI2_CKPT_ROOT")
    return root.expanduser()
