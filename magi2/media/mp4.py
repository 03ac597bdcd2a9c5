"""Write a clip as mp4: H.264 and AAC in one pass, checked before it gets its name.

Promises: the file has exactly the size, the frames and the samples of the contract or does not exist; equal
clips give equal bytes on one type of machine; memory does not grow with the size of the file. Pictures are
converted with BT.601 in limited range and tagged so.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
import torch
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from torch import Tensor

from magi2.contract import FPS, NUM_FRAMES, NUM_SAMPLES, SAMPLE_RATE_HZ
from magi2.errors import EngineError, InvalidInput
from magi2.media.clip import Clip
from magi2.media.probe import breaches, probe
from magi2.media.target import beside, followed

DEFAULT_CRF = 10

_VIDEO_CODEC, _AUDIO_CODEC = "libx264", "aac"
_AUDIO_BITS_PER_SECOND = 128_000
# The bytes of the file depend on this number, so it does not follow the machine.
_NUM_THREADS = 4
_SMPTE170M = 6
_SAMPLES_PER_FRAME = NUM_SAMPLES // NUM_FRAMES
# libx264 else picks approximations by processor, and with AVX-512 two runs of one machine have differed.
_X264_PARAMS = "cpu-independent=1"
# Exact arithmetic in the conversion, whatever the processor.
_CONVERSION = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT


def write_mp4(path: Path, clip: Clip, *, crf: int = DEFAULT_CRF, preset: str = "medium") -> None:
    """Encode a clip, check the result and put it at `path`.

    Args:
        path: Where the finished file appears, complete, in one step; a symbolic link is followed.
        clip: Pictures of an even size, and finite samples.
        crf: Quality of libx264, 0 (lossless) to 51; the model's authors use 10.
        preset: Speed of libx264.

    Raises:
        InvalidInput: The size is odd, or crf is out of range.
        EngineError: A track could not be encoded or written, or the file breaks the contract; no file stays.
    """
    size = (clip.width, clip.height)
    check_encodable(size, clip.samples, crf=crf)
    with unfinished_file(path, size) as unfinished:
        encode(unfinished, clip.each_frame(), clip.samples, size, crf=crf, preset=preset)


def check_encodable(size: tuple[int, int], samples_W2: Tensor, *, crf: int) -> None:
    """Refuse what no file can be made of.

    Raises:
        InvalidInput: The size is odd, or crf is out of range.
        EngineError: A sample is not finite.
    """
    width, height = size
    if width % 2 or height % 2:
        raise InvalidInput(f"the video size {width}x{height} is odd; both sides must be even")
    if not 0 <= crf <= 51:
        raise InvalidInput(f"crf is {crf}; it must be from 0 (lossless) to 51")
    if not torch.isfinite(samples_W2).all():
        raise EngineError("the audio decoder returned samples that are not finite; no file was written")


@contextmanager
def unfinished_file(
    path: Path, size: tuple[int, int], *, before_naming: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield a place for a file that is checked and gets its name when the block ends, and else disappears.

    Args:
        path: Where it goes; a symbolic link is followed.
        size: Width and height that the file must have.
        before_naming: Called last of all; if it raises, the file disappears.

    Raises:
        EngineError: The block could not encode or write, or the file breaks the contract.
    """
    unfinished: Path | None = None
    try:
        target = followed(path)
        unfinished = beside(target)
        yield unfinished
        broken = breaches(probe(unfinished), *size)
        if broken:
            raise EngineError(f"the encoded file breaks the output contract: {'; '.join(broken)}")
        before_naming()
        unfinished.replace(target)
    except (FFmpegError, OSError, ValueError) as error:
        raise EngineError(f"{path}: the clip could not be encoded or written: {error}") from error
    finally:
        if unfinished is not None:
            # What hinders the removal has failed the file before, and that is the error to tell.
            with suppress(OSError):
                unfinished.unlink()


def encode(
    path: Path,
    frames: Iterable[Tensor],
    samples_W2: Tensor,
    size: tuple[int, int],
    *,
    crf: int,
    preset: str,
) -> None:
    """Encode finished frames, uint8 [height, width, 3], as they come, with their sound.

    Raises:
        FFmpegError, OSError, ValueError: It cannot be done; part of the file may be there.
    """
    options = {"movflags": "+faststart", "fflags": "+bitexact"}
    with av.open(path, "w", format="mp4", options=options) as container:
        video = _add_video(container, *size, crf=crf, preset=preset)
        audio = _add_audio(container)
        # Picture by picture with its sound, so that the muxer never has to hold back much of one track.
        for picture, sound in zip(_pictures(frames), _sounds(samples_W2), strict=True):
            container.mux(video.encode(picture))
            container.mux(audio.encode(sound))
        container.mux(video.encode(None))
        container.mux(audio.encode(None))


def _add_video(container: OutputContainer, width: int, height: int, *, crf: int, preset: str) -> VideoStream:
    options = {"crf": str(crf), "preset": preset, "flags": "+bitexact", "x264-params": _X264_PARAMS}
    stream = cast(VideoStream, container.add_stream(_VIDEO_CODEC, rate=FPS, options=options))
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    context = stream.codec_context
    context.thread_count = _NUM_THREADS
    context.time_base = 1 / FPS
    context.color_range = ColorRange.MPEG
    context.colorspace = context.color_primaries = context.color_trc = _SMPTE170M
    return stream


def _add_audio(container: OutputContainer) -> AudioStream:
    options = {"flags": "+bitexact"}
    stream = cast(AudioStream, container.add_stream(_AUDIO_CODEC, rate=SAMPLE_RATE_HZ, options=options))
    stream.codec_context.layout = "stereo"
    stream.codec_context.bit_rate = _AUDIO_BITS_PER_SECOND
    return stream


def _pictures(frames: Iterable[Tensor]) -> Iterator[av.VideoFrame]:
    reformatter = VideoReformatter()
    for index, frame_YXC in enumerate(frames):
        rgb = av.VideoFrame.from_ndarray(frame_YXC.numpy(), format="rgb24")
        picture = reformatter.reformat(
            rgb,
            format="yuv420p",
            dst_colorspace=Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
            interpolation=_CONVERSION,
        )
        picture.pts, picture.time_base = index, 1 / FPS
        yield picture


def _sounds(samples_W2: Tensor) -> Iterator[av.AudioFrame]:
    planar = np.ascontiguousarray(samples_W2.clamp(-1.0, 1.0).numpy().T)
    for start in range(0, NUM_SAMPLES, _SAMPLES_PER_FRAME):
        part = np.ascontiguousarray(planar[:, start : start + _SAMPLES_PER_FRAME])
        sound = av.AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
        # A time stamp of its own from zero on: the encoder's priming then goes into the edit list.
        sound.pts, sound.sample_rate, sound.time_base = start, SAMPLE_RATE_HZ, Fraction(1, SAMPLE_RATE_HZ)
        yield sound
