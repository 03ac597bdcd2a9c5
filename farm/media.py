"""What the farm itself does with a finished file: check it, cut a thumbnail, a sprite sheet and the sound.

PyAV and Pillow only, no torch. The facts come from `magi2/media/probe.py`, which the engine's own
command shares. It never repairs a file: a breach is an engine error, not a success.
"""

import wave
from dataclasses import dataclass
from pathlib import Path

import av
from av.error import FFmpegError
from PIL import Image

from magi2.contract import NUM_FRAMES, NUM_SAMPLES, SAMPLE_RATE_HZ
from magi2.media.probe import Probe, breaches, probe

THUMBNAIL_SIDE = 480
THUMBNAIL_AT_S = 2.0
JPEG_QUALITY = 85
# One tile for every fifth frame, row by row: what a player shows above its time line.
SPRITE_COLUMNS, SPRITE_ROWS = 5, 5
SPRITE_EVERY = NUM_FRAMES // (SPRITE_COLUMNS * SPRITE_ROWS)
SPRITE_TILE_WIDTH = 224
SAMPLE_BYTES = 2
AUDIO_CHANNELS = 2


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


def make_sprite_sheet(video: Path, target: Path) -> tuple[int, int]:
    """Write every fifth frame of a clip as a tile of one JPEG and return the size of the sheet.

    Raises:
        MediaError: No frame can be decoded.
    """
    sheet: Image.Image | None = None
    try:
        with av.open(video) as container:
            for number, frame in enumerate(container.decode(video=0)):
                tile_number, rest = divmod(number, SPRITE_EVERY)
                if rest or tile_number >= SPRITE_COLUMNS * SPRITE_ROWS:
                    continue
                tile = _tile(frame)
                if sheet is None:
                    sheet = Image.new("RGB", (tile.width * SPRITE_COLUMNS, tile.height * SPRITE_ROWS))
                row, column = divmod(tile_number, SPRITE_COLUMNS)
                sheet.paste(tile, (column * tile.width, row * tile.height))
    except FFmpegError as error:
        raise MediaError(f"no frame can be decoded: {type(error).__name__}") from error
    if sheet is None:
        raise MediaError("the file has no pictures")
    sheet.save(target, "JPEG", quality=JPEG_QUALITY)
    return sheet.size


def extract_audio(video: Path, target: Path) -> None:
    """Write the sound of a clip as a WAV of exactly its ten seconds: 16 bit, stereo, 44.1 kHz.

    Raises:
        MediaError: No sound can be decoded.
    """
    resampler = av.AudioResampler(format="s16", layout="stereo", rate=SAMPLE_RATE_HZ)
    pcm = bytearray()
    try:
        with av.open(video) as container:
            for frame in container.decode(audio=0):
                for part in resampler.resample(frame):
                    pcm += bytes(part.planes[0])[: part.samples * AUDIO_CHANNELS * SAMPLE_BYTES]
    except (FFmpegError, IndexError) as error:
        raise MediaError(f"no sound can be decoded: {type(error).__name__}") from error
    if not pcm:
        raise MediaError("the file has no sound")
    # The codec's last frame is padded, or a little short.
    num_bytes = NUM_SAMPLES * AUDIO_CHANNELS * SAMPLE_BYTES
    with wave.open(str(target), "wb") as file:
        file.setnchannels(AUDIO_CHANNELS)
        file.setsampwidth(SAMPLE_BYTES)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(bytes(pcm[:num_bytes]).ljust(num_bytes, b"\0"))


def _tile(frame: av.VideoFrame) -> Image.Image:
    picture: Image.Image = frame.to_image()  # type: ignore[no-untyped-call]  # PyAV leaves it open
    height = round(picture.height * SPRITE_TILE_WIDTH / picture.width)
    return picture.resize((SPRITE_TILE_WIDTH, height))
