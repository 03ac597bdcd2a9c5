"""The probe reads facts from files that other tools wrote, and refuses what is no clip."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from magi2.errors import EngineError
from magi2.media.probe import UnreadableClipError, breaches, probe


def foreign_file(
    path: Path,
    *,
    kind: str = "mp4",
    rate: Fraction = Fraction(25),
    num_frames: int = 10,
    with_sound: bool = False,
) -> Path:
    """Write a small video that is no clip of ours."""
    with av.open(path, "w", format=kind) as container:
        video = container.add_stream("libx264", rate=rate, options={"preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("aac", rate=48_000) if with_sound else None
        if sound is not None:
            sound.codec_context.layout = "mono"
        for _ in range(num_frames):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
        container.mux(video.encode(None))
        if sound is not None:
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 48_000
            container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return path


def test_facts_of_our_own_file(written: Path) -> None:
    facts = probe(written)
    assert facts.codec_types == ("video", "audio")
    assert facts.duration_us == 10_000_000
    assert facts.size_bytes == written.stat().st_size
    assert facts.is_faststart
    assert facts.video is not None
    assert (facts.video.width, facts.video.height, facts.video.nb_frames) == (96, 64, 125)
    assert facts.video.avg_frame_rate == Fraction(25, 2)
    assert facts.audio is not None
    assert (facts.audio.sample_rate, facts.audio.channels, facts.audio.num_samples) == (44_100, 2, 441_000)
    assert facts.audio.start_time_s == facts.video.start_time_s == 0.0


def test_json_names_the_tracks_as_ffprobe_does(written: Path) -> None:
    values = json.loads(json.dumps(probe(written).to_json()))
    assert values["codec_types"] == ["video", "audio"]
    video, audio = values["streams"]
    assert (video["codec_type"], video["codec_name"], video["avg_frame_rate"]) == ("video", "h264", "25/2")
    assert (video["width"], video["height"], video["nb_frames"]) == (96, 64, 125)
    assert (audio["codec_type"], audio["sample_rate"], audio["channels"]) == ("audio", 44_100, 2)
    assert values["format"]["duration_s"] == 10.0


def test_other_size_is_one_breach(written: Path) -> None:
    assert breaches(probe(written), 448, 256) == ["the video track's size is 96x64, not 448x256"]


def test_silent_foreign_video_breaks_the_contract_in_many_ways(tmp_path: Path) -> None:
    facts = probe(foreign_file(tmp_path / "a.mp4"))
    assert facts.audio is None
    found = breaches(facts, 64, 48)
    assert "the tracks are: video; exactly one video and one audio track are needed" in found
    assert "the file lasts 0.400 s, not 10 s" in found
    assert "the index (moov) is not in front of the media data" in found
    assert "the video track's frame rate is 25, not 25/2" in found
    assert "the video track's number of frames is 10, not 125" in found


def test_sound_of_another_form_is_named(tmp_path: Path) -> None:
    found = breaches(probe(foreign_file(tmp_path / "a.mp4", with_sound=True)), 64, 48)
    assert "the audio track's sample rate is 48000, not 44100" in found
    assert "the audio track's number of channels is 1, not 2" in found


@pytest.mark.parametrize(("kind", "name"), [("mov", "qt"), ("matroska", "matroska")])
def test_other_container_is_a_breach(tmp_path: Path, kind: str, name: str) -> None:
    facts = probe(foreign_file(tmp_path / f"a.{kind}", kind=kind))
    assert any("the container is" in text and name in text for text in breaches(facts, 64, 48))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_truncated_clip_is_a_breach_though_its_index_is_whole(
    tmp_path: Path, written: Path, share: float
) -> None:
    path, content = tmp_path / "cut.mp4", written.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert breaches(probe(path), 96, 64) != []


def test_clip_that_ends_within_its_index_is_unreadable(tmp_path: Path, written: Path) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(written.read_bytes()[:1000])
    with pytest.raises(UnreadableClipError, match=r"^cut\.mp4: cannot be read as a video file \(.+\)$"):
        probe(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello " * 100, bytes(4096), b"\x00\x00\x00\x18ftypisom" + bytes(64)]
)
def test_file_that_is_no_video_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.mp4"
    path.write_bytes(content)
    with pytest.raises(
        UnreadableClipError, match=r"^text\.mp4: cannot be read as a video file \(.+\)$"
    ) as caught:
        probe(path)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, EngineError)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableClipError, match="there is no such file"):
        probe(tmp_path / "gone.mp4")
    with pytest.raises(UnreadableClipError, match="this is a folder"):
        probe(tmp_path)


def test_still_image_is_not_taken_for_a_clip(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    av.VideoFrame.from_ndarray(np.zeros((64, 96, 3), np.uint8)).to_image().save(path)
    assert "the container is png_pipe of the brand None, not mp4" in breaches(probe(path), 96, 64)


def test_probe_needs_no_torch(written: Path) -> None:
    code = (
        "import sys, pathlib, magi2.media.probe as p; "
        "print(p.breaches(p.probe(pathlib.Path(sys.argv[1])), 96, 64), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(written)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] False"
    assert done.stderr == ""
