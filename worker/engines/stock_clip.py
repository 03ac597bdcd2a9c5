"""A small real mp4 that keeps the clip contract, for the engines of the tests.

It is encoded once per size and process with PyAV alone (no torch, no numpy): a moving gradient and a
tone, 125 frames at 12.5 fps and ten seconds of stereo at 44.1 kHz. Nothing here is part of a production
render.
"""

import math
import struct
import tempfile
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import av
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from magi2.contract import FPS, NUM_FRAMES, NUM_SAMPLES, SAMPLE_RATE_HZ

TONE_HZ = 441
PERIOD = SAMPLE_RATE_HZ // TONE_HZ


@lru_cache(maxsize=8)
def stock_clip(width: int, height: int, num_frames: int = NUM_FRAMES) -> bytes:
    """Return the bytes of the clip; another number of frames makes a file that must be refused."""
    # A real file: "faststart" opens the finished file a second time by its name.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with av.open(path, "w", format="mp4", options={"movflags": "+faststart"}) as container:
            video = container.add_stream("libx264", rate=FPS)
            video.width, video.height, video.pix_fmt = width, height, "yuv420p"
            video.options = {"preset": "ultrafast", "crf": "30", "threads": "1"}
            audio = container.add_stream("aac", rate=SAMPLE_RATE_HZ, layout="stereo")
            audio.bit_rate = 128_000
            _write_video(container, video, num_frames)
            _write_audio(container, audio)
        return path.read_bytes()


def _write_video(container: av.container.OutputContainer, stream: VideoStream, num_frames: int) -> None:
    for index in range(num_frames):
        frame = av.VideoFrame(stream.width, stream.height, "yuv420p")
        luma = bytes(32 + (column + 2 * index) % 192 for column in range(frame.planes[0].line_size))
        frame.planes[0].update(luma * frame.planes[0].height)
        for plane in frame.planes[1:]:
            plane.update(bytes([128 + index // 2]) * plane.buffer_size)
        frame.pts, frame.time_base = index, 1 / FPS
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def _write_audio(container: av.container.OutputContainer, stream: AudioStream) -> None:
    frame = av.AudioFrame(format="fltp", layout="stereo", samples=NUM_SAMPLES)
    period = struct.pack(f"<{PERIOD}f", *(0.2 * math.sin(2 * math.pi * i / PERIOD) for i in range(PERIOD)))
    samples = period * (NUM_SAMPLES // PERIOD)
    for plane in frame.planes:
        plane.update(samples.ljust(plane.buffer_size, b"\0"))
    frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE_HZ, 0, Fraction(1, SAMPLE_RATE_HZ)
    container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
