"""What a finished mp4 is, read from the file itself, and where it breaks the contract of the output.

Promises: no torch; every packet of the file is read, so a truncated file does not pass for a whole one; a
file that is no video is refused in one sentence. It decodes no picture and judges no content.
"""

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream

from magi2.contract import CLIP_SECONDS, FPS, NUM_FRAMES, NUM_SAMPLES, SAMPLE_RATE_HZ
from magi2.errors import EngineError

_MICROSECONDS = 1_000_000
_UNSPECIFIED, _LIMITED_RANGE = "unknown", "tv"
# The ISO/IEC 23091-2 code points that can occur in a file of ours, and those that would be wrong in one.
_MATRICES = {
    0: "gbr",
    1: "bt709",
    2: _UNSPECIFIED,
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    9: "bt2020nc",
}
_PRIMARIES = {1: "bt709", 2: _UNSPECIFIED, 5: "bt470bg", 6: "smpte170m", 7: "smpte240m", 9: "bt2020"}
_TRANSFERS = {1: "bt709", 2: _UNSPECIFIED, 4: "gamma22", 5: "gamma28", 6: "smpte170m", 13: "iec61966-2-1"}
_RANGES = {0: _UNSPECIFIED, 1: _LIMITED_RANGE, 2: "pc"}
# Pictures are converted with BT.601; both names mean its matrix.
_BT601 = frozenset({_UNSPECIFIED, "smpte170m", "bt470bg"})
# One demuxer reads both kinds of file; the brand tells them apart.
_QUICKTIME = "qt  "
_BOX_HEADER = struct.Struct(">I4s")


class UnreadableClipError(EngineError, ValueError):
    """The file is missing, damaged or no video at all."""


@dataclass(frozen=True)
class VideoFacts:
    """The video track."""

    codec_name: str
    profile: str | None
    pix_fmt: str | None
    width: int
    height: int
    avg_frame_rate: Fraction | None
    nb_frames: int
    start_time_s: float | None
    duration_s: float | None
    color_space: str
    color_primaries: str
    color_transfer: str
    color_range: str


@dataclass(frozen=True)
class AudioFacts:
    """The audio track; `num_samples` is its length by the edit list, encoder padding left out."""

    codec_name: str
    profile: str | None
    sample_rate: int
    channels: int
    layout: str
    num_samples: int
    start_time_s: float | None
    duration_s: float | None


@dataclass(frozen=True)
class Probe:
    """The facts of one file: its container and its first video and audio track."""

    format_names: tuple[str, ...]
    major_brand: str | None
    duration_us: int | None
    size_bytes: int
    is_faststart: bool
    codec_types: tuple[str, ...]
    video: VideoFacts | None
    audio: AudioFacts | None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values in ffprobe's form: `format`, and one entry of `streams` for each track."""
        streams: list[dict[str, Any]] = []
        for codec_type, facts in (("video", self.video), ("audio", self.audio)):
            if facts is not None:
                streams.append({"codec_type": codec_type, **asdict(facts)})
        for stream in streams:
            rate = stream.get("avg_frame_rate")
            if rate is not None:
                stream["avg_frame_rate"] = f"{rate.numerator}/{rate.denominator}"
        return {
            "format": {
                "format_name": ",".join(self.format_names),
                "major_brand": self.major_brand,
                "nb_streams": len(self.codec_types),
                "duration_s": None if self.duration_us is None else self.duration_us / _MICROSECONDS,
                "size": self.size_bytes,
                "is_faststart": self.is_faststart,
            },
            "codec_types": list(self.codec_types),
            "streams": streams,
        }


def probe(path: Path) -> Probe:
    """Read the facts of a media file.

    Raises:
        UnreadableClipError: The file is missing, damaged or no media file.
    """
    if path.is_dir():
        raise UnreadableClipError(f"{path.name or path}: this is a folder; name the file in it")
    if not path.is_file():
        raise UnreadableClipError(f"{path.name}: there is no such file")
    try:
        with av.open(path, "r") as container:
            return _facts_of(container, path)
    except FFmpegError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UnreadableClipError(f"{path.name}: cannot be read as a video file ({reason})") from None


def _facts_of(container: InputContainer, path: Path) -> Probe:
    videos, audios = container.streams.video, container.streams.audio
    counts = _packet_counts(container)
    return Probe(
        format_names=tuple(container.format.name.split(",")),
        major_brand=container.metadata.get("major_brand"),
        duration_us=container.duration,
        size_bytes=path.stat().st_size,
        is_faststart=_is_faststart(path),
        codec_types=tuple(stream.type for stream in container.streams),
        video=_video_facts(videos[0], counts.get(videos[0].index, 0)) if videos else None,
        audio=_audio_facts(audios[0], counts.get(audios[0].index, 0)) if audios else None,
    )


def _packet_counts(container: InputContainer) -> dict[int, int]:
    counts: dict[int, int] = {}
    for packet in container.demux():
        if packet.size and not packet.is_corrupt:
            counts[packet.stream_index] = counts.get(packet.stream_index, 0) + 1
    return counts


def _video_facts(stream: VideoStream, num_packets: int) -> VideoFacts:
    context = stream.codec_context
    return VideoFacts(
        codec_name=context.name,
        profile=context.profile,
        pix_fmt=context.pix_fmt,
        width=context.width,
        height=context.height,
        avg_frame_rate=stream.average_rate,
        # The index and the packets agree in a whole file; the lower number shows a truncated one.
        nb_frames=min(stream.frames, num_packets) if stream.frames else num_packets,
        start_time_s=_seconds(stream.start_time, stream.time_base),
        duration_s=_seconds(stream.duration, stream.time_base),
        color_space=_MATRICES.get(context.colorspace, str(context.colorspace)),
        color_primaries=_PRIMARIES.get(context.color_primaries, str(context.color_primaries)),
        color_transfer=_TRANSFERS.get(context.color_trc, str(context.color_trc)),
        color_range=_RANGES.get(context.color_range, str(context.color_range)),
    )


def _audio_facts(stream: AudioStream, num_packets: int) -> AudioFacts:
    context = stream.codec_context
    duration_s = _seconds(stream.duration, stream.time_base)
    return AudioFacts(
        codec_name=context.name,
        profile=context.profile,
        sample_rate=context.sample_rate,
        channels=context.layout.nb_channels,
        layout=context.layout.name,
        num_samples=_num_samples(stream, num_packets),
        start_time_s=_seconds(stream.start_time, stream.time_base),
        duration_s=duration_s,
    )


def _num_samples(stream: AudioStream, num_packets: int) -> int:
    if stream.duration is None or stream.time_base is None or num_packets < stream.frames:
        return 0
    return round(stream.duration * stream.time_base * stream.codec_context.sample_rate)


def _seconds(value: int | None, time_base: Fraction | None) -> float | None:
    return None if value is None or time_base is None else float(value * time_base)


def _is_faststart(path: Path) -> bool:
    """Whether the index stands before the media data, so that a player can begin with the first bytes."""
    with path.open("rb") as file:
        return next((kind == b"moov" for kind in _top_level_boxes(file) if kind in {b"moov", b"mdat"}), False)


def _top_level_boxes(file: BinaryIO) -> Iterator[bytes]:
    while len(header := file.read(_BOX_HEADER.size)) == _BOX_HEADER.size:
        size, kind = _BOX_HEADER.unpack(header)
        yield kind
        skipped = _BOX_HEADER.size
        if size == 1:  # the size follows in 64 bits
            size, skipped = int.from_bytes(file.read(8), "big"), skipped + 8
        if size < skipped:  # 0 is "to the end of the file"; anything else is damage
            return
        file.seek(size - skipped, 1)


def breaches(facts: Probe, width: int, height: int) -> list[str]:
    """Compare a file with what a finished clip must be; one sentence for each deviation.

    Args:
        facts: What `probe` found.
        width, height: The size that was asked for.
    """
    found = list(_container_breaches(facts))
    if facts.video is not None:
        found += _video_breaches(facts.video, width, height)
    if facts.audio is not None:
        found += _audio_breaches(facts.audio)
    return found


def _container_breaches(facts: Probe) -> Iterator[str]:
    if "mp4" not in facts.format_names or facts.major_brand == _QUICKTIME:
        yield f"the container is {','.join(facts.format_names)} of the brand {facts.major_brand}, not mp4"
    if sorted(facts.codec_types) != ["audio", "video"]:
        kinds = ", ".join(facts.codec_types) or "none"
        yield f"the tracks are: {kinds}; exactly one video and one audio track are needed"
    if facts.duration_us != CLIP_SECONDS * _MICROSECONDS:
        yield f"the file lasts {_shown_us(facts.duration_us)}, not {CLIP_SECONDS} s"
    if not facts.is_faststart:
        yield "the index (moov) is not in front of the media data"


def _video_breaches(video: VideoFacts, width: int, height: int) -> Iterator[str]:
    wanted: dict[str, tuple[object, object]] = {
        "codec": (video.codec_name, "h264"),
        "pixel format": (video.pix_fmt, "yuv420p"),
        "size": (f"{video.width}x{video.height}", f"{width}x{height}"),
        "frame rate": (video.avg_frame_rate, FPS),
        "number of frames": (video.nb_frames, NUM_FRAMES),
        "start": (video.start_time_s, 0.0),
        "duration in seconds": (video.duration_s, float(CLIP_SECONDS)),
    }
    yield from _differences("video", wanted)
    if video.color_space not in _BT601 or video.color_range not in {_UNSPECIFIED, _LIMITED_RANGE}:
        tags = f"{video.color_space}, {video.color_range}"
        yield f"the video is tagged {tags}, but its pixels are BT.601 in limited range"


def _audio_breaches(audio: AudioFacts) -> Iterator[str]:
    wanted: dict[str, tuple[object, object]] = {
        "codec": (audio.codec_name, "aac"),
        "profile": (audio.profile, "LC"),
        "sample rate": (audio.sample_rate, SAMPLE_RATE_HZ),
        "number of channels": (audio.channels, 2),
        "layout": (audio.layout, "stereo"),
        "number of samples": (audio.num_samples, NUM_SAMPLES),
        "start": (audio.start_time_s, 0.0),
    }
    yield from _differences("audio", wanted)


def _differences(track: str, wanted: dict[str, tuple[object, object]]) -> Iterator[str]:
    for name, (found, needed) in wanted.items():
        if found != needed:
            yield f"the {track} track's {name} is {found}, not {needed}"


def _shown_us(duration_us: int | None) -> str:
    return "an unknown time" if duration_us is None else f"{duration_us / _MICROSECONDS:.3f} s"
