"""Where a finished file goes: what may stand there, and the unfinished file beside it.

Promises: a symbolic link is followed, so the file that it names is replaced and the link stays; nothing but a
regular file is ever replaced; whether a file can be made is found out by making one. Torch-free.
"""

import shutil
import stat
from pathlib import Path
from secrets import token_hex

# A clip of noise at 272p is 2.6 MB, so one of 540p, with four times the pixels, is about 10 MB.
MIN_FREE_BYTES = 64 * 2**20
_MIB = 2**20
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def followed(path: Path) -> Path:
    """Return the place of the regular file that `path` names, whether it exists yet or not.

    Raises:
        ValueError: Something else stands there.
        OSError: It cannot be looked at.
    """
    try:
        target = path.resolve()
    except RuntimeError as error:  # what pathlib makes of links in a circle
        raise ValueError("its symbolic links lead in a circle; name a file") from error
    # Both, as a link to an open pipe resolves to a name that does not exist.
    for each in (path, target):
        try:
            mode = each.stat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(mode):
            raise ValueError("it is a folder; name a file, in it or elsewhere")
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
            raise ValueError(f"it is {kind}; name a new file or a regular one")
    return target


def beside(target: Path) -> Path:
    """Return a new hidden name in the folder of a file; it is short, however long the file's own is."""
    return target.parent / f".magi2-{token_hex(6)}.part"


def why_no_file(path: Path) -> str | None:
    """Say why no clip can be put at `path`, or None if one can."""
    try:
        target = followed(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return _unmade(error)
    if not target.parent.is_dir():
        return "the folder does not exist; create it, or name another"
    return _why_unfit(target.parent)


def why_no_folder(path: Path) -> str | None:
    """Say why no clips can be put into the folder `path`, or None if they can; it is made if absent."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        return _unmade(error)
    return _why_unfit(path)


def _why_unfit(folder: Path) -> str | None:
    trial = beside(folder / "clip")
    try:
        try:
            trial.touch(exist_ok=False)
        finally:
            trial.unlink(missing_ok=True)
        space = shutil.disk_usage(folder)
    except OSError as error:
        return _unmade(error)
    # A file system that does not say its size says that nothing is free.
    if space.total and space.free < MIN_FREE_BYTES:
        return (
            f"{space.free // _MIB} MiB are free there and {MIN_FREE_BYTES // _MIB} MiB are required; make "
            "room, or name another place"
        )
    return None


def _unmade(error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"no file can be made there: {reason}; name a place in a folder that you may write to"
