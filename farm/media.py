"""What the farm itself does with a finished file: check it against the contract, and cut a thumbnail.

PyAV and Pillow only, no torch. The facts come from `magi2/media/probe.py`, which the engine's own
command shares. It never repairs a file: a breach is an engine error, not a success.
"""

from dataclasses import dataclass
from pathlib import Path

import av
from av.error import FFmpegError
from PIL import Image

from magi2.media.probe import Probe, breaches, probe

THUMBNAIL_SIDE = 480
THUMBNAIL_AT_S = 2.0
JPEG_QUALITY = 85


class MediaError(Exception):
    """A file that should be a clip cannot be read as one."""


@dataclass(frozen=True)
class Inspection:
    """What a finished file is, if it can be read, and one sentence for each breach of the contract."""

    facts: Probe | None
    problems: list[str]


def inspect_output(path: Path, width: int, height: int) -> Inspection:
    """Parse a finished file and compare it with the clip that was asked for."""
    if not path.is_file() or path.stat().st_size == 0:
        return Inspection(None, ["the engine left no file"])
    try:
        facts = probe(path)
    except (FFmpegError, ValueError) as error:
        return Inspection(None, [f"the file cannot be read as an mp4: {type(error).__name__}"])
    return Inspection(facts, breaches(facts, width, height))


def make_thumbnail(video: Path, target: Path) -> tuple[int, int]:
    """Write one frame of a clip as a small JPEG and return its size.

    Raises:
        MediaError: No frame can be decoded.
    """
    try:
        picture = _frame_near(video, THUMBNAIL_AT_S)
    except FFmpegError as error:
        raise MediaError(f"no frame can be decoded: {type(error).__name__}") from error
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    picture.save(target, "JPEG", quality=JPEG_QUALITY)
    return picture.size


def _frame_near(video: Path, at_s: float) -> Image.Image:
    """Decode from the start to the frame at a time: openings are often darker than what follows."""
    with av.open(video) as container:
        newest: av.VideoFrame | None = None
        for frame in container.decode(video=0):
            newest = frame
            if frame.time is not None and frame.time >= at_s:
                break
        if newest is None:
            raise MediaError("the file has no pictures")
        picture: Image.Image = newest.to_image()  # type: ignore[no-untyped-call]  # PyAV leaves it open
        return picture
