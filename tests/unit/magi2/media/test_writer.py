"""A clip encoded while it is made: the bytes of one encoded afterwards, and nothing left by a failure."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from magi2.errors import EngineError, InvalidInput
from magi2.media import mp4, writer
from magi2.media.clip import Clip
from magi2.media.mp4 import write_mp4
from magi2.media.writer import ClipWriter

WINDOWS = (25, 28, 28, 28, 16)


def windows(clip: Clip) -> Iterator[Tensor]:
    return iter(torch.split(clip.frames, WINDOWS))


def frame_size(clip: Clip) -> tuple[int, int]:
    return clip.frames.shape[2], clip.frames.shape[1]


def begin(own: ClipWriter, clip: Clip) -> None:
    own.begin(clip.samples, frame_size(clip), clip.output_size)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("encode")] == []


@pytest.mark.parametrize("output_size", [None, (130, 70)], ids=["own size", "resized"])
def test_bytes_are_those_of_a_clip_that_is_written_whole(
    tmp_path: Path, clip: Clip, output_size: tuple[int, int] | None
) -> None:
    clip = Clip(clip.frames, clip.samples, output_size)
    write_mp4(tmp_path / "whole.mp4", clip, preset="ultrafast")
    with ClipWriter(tmp_path / "streamed.mp4", preset="ultrafast") as own:
        begin(own, clip)
        for frames in windows(clip):
            own.add(frames)
        own.finish()
    assert (tmp_path / "streamed.mp4").read_bytes() == (tmp_path / "whole.mp4").read_bytes()
    assert left_in(tmp_path) == ["streamed.mp4", "whole.mp4"]


def test_encoder_works_before_the_last_window_is_there(tmp_path: Path, clip: Clip) -> None:
    with ClipWriter(tmp_path / "clip.mp4", preset="ultrafast") as own:
        begin(own, clip)
        parts = windows(clip)
        own.add(next(parts))
        while not own._queue.empty():  # taken by the encoder, though four windows are missing
            time.sleep(0.01)
        assert own._encoder.is_alive()
        for frames in parts:
            own.add(frames)
        own.finish()


def test_decoder_waits_while_two_windows_wait(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, added = threading.Event(), []
    pictures = mp4._pictures

    def held(frames: object) -> object:
        gate.wait()
        return pictures(frames)

    monkeypatch.setattr(mp4, "_pictures", held)
    with ClipWriter(tmp_path / "clip.mp4", preset="ultrafast") as own:
        begin(own, clip)

        def decode() -> None:
            for frames in windows(clip):
                own.add(frames)
                added.append(len(frames))

        decoder = threading.Thread(target=decode)
        decoder.start()
        while not own._queue.full():
            time.sleep(0.01)
        time.sleep(5 * writer._LOOK_S)
        assert len(added) == writer._MAX_WAITING
        gate.set()
        decoder.join()
        own.finish()
    assert left_in(tmp_path) == ["clip.mp4"]


@pytest.mark.parametrize("after", [0, 40], ids=["at once", "later"])
def test_failing_encoder_is_told_at_the_end_and_leaves_nothing(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    pictures = mp4._pictures

    def failing(frames: object) -> Iterator[object]:
        for index, picture in enumerate(pictures(frames)):
            if index == after:
                raise OSError(28, "No space left on device")
            yield picture

    monkeypatch.setattr(mp4, "_pictures", failing)
    with ClipWriter(tmp_path / "clip.mp4", preset="ultrafast") as own:
        begin(own, clip)
        for frames in windows(clip):
            own.add(frames)  # never raises and never blocks for good: other ranks count on this one
        with pytest.raises(EngineError, match=r"clip\.mp4: the clip could not be encoded .*No space left"):
            own.finish()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("fault", ["odd size", "crf", "sound"])
def test_what_cannot_be_encoded_is_refused_at_the_end(tmp_path: Path, clip: Clip, fault: str) -> None:
    samples = clip.samples.clone()
    samples[5, 0] = torch.nan if fault == "sound" else 0
    size = (97, 64) if fault == "odd size" else frame_size(clip)
    with ClipWriter(tmp_path / "clip.mp4", crf=52 if fault == "crf" else 10) as own:
        own.begin(samples, size, None)
        for frames in windows(clip):
            own.add(frames)
        with pytest.raises(EngineError if fault == "sound" else InvalidInput):
            own.finish()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("num_windows", [0, 1, 5])
def test_failing_decoder_ends_the_encoder_and_leaves_nothing(
    tmp_path: Path, clip: Clip, num_windows: int
) -> None:

    def render() -> None:
        with ClipWriter(tmp_path / "clip.mp4", preset="ultrafast") as own:
            begin(own, clip)
            for _, frames in zip(range(num_windows), windows(clip), strict=False):
                own.add(frames)
            raise RuntimeError("no more windows")

    with pytest.raises(RuntimeError, match="no more windows"):
        render()
    assert left_in(tmp_path) == []


def test_giving_up_replaces_no_older_file(tmp_path: Path, clip: Clip) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"older")
    with ClipWriter(tmp_path / "clip.mp4", preset="ultrafast") as own:
        begin(own, clip)
        own.add(clip.frames)  # all frames, yet nobody said that they were wanted
    assert (tmp_path / "clip.mp4").read_bytes() == b"older"
    assert left_in(tmp_path) == ["clip.mp4"]


@pytest.mark.parametrize("length", [124, 126])
def test_wrong_number_of_frames_fails_the_file(tmp_path: Path, clip: Clip, length: int) -> None:
    frames = clip.frames.repeat(2, 1, 1, 1)[:length]
    with ClipWriter(tmp_path / "clip.mp4", preset="ultrafast") as own:
        begin(own, clip)
        own.add(frames)
        with pytest.raises(EngineError, match="could not be encoded or written"):
            own.finish()
    assert left_in(tmp_path) == []


def test_nothing_begun_is_nothing_to_finish(tmp_path: Path) -> None:
    with ClipWriter(tmp_path / "clip.mp4") as own, pytest.raises(EngineError, match="no clip was begun"):
        own.finish()


def test_interrupt_while_the_file_is_checked_publishes_nothing(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"older")
    asked, probed = threading.Event(), mp4.probe
    own = ClipWriter(tmp_path / "clip.mp4", preset="ultrafast")

    def held(path: Path) -> object:
        asked.set()
        while not own._is_abandoned:
            time.sleep(0.01)
        return probed(path)

    monkeypatch.setattr(mp4, "probe", held)

    def render() -> None:
        with own:
            begin(own, clip)
            own.add(clip.frames)
            own._put(None)  # as `finish` does, which then waits
            asked.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        render()
    assert not own.is_written
    assert (tmp_path / "clip.mp4").read_bytes() == b"older"
    assert left_in(tmp_path) == ["clip.mp4"]


def test_interrupt_while_it_is_closed_leaves_nothing(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ClipWriter(tmp_path / "clip.mp4", preset="ultrafast")
    begin(own, clip)
    own.add(clip.frames[:10])
    join = own._encoder.join

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(own._encoder, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.close()
    join()  # it ends by itself
    assert left_in(tmp_path) == []


def test_encoder_of_a_writer_that_nobody_closed_ends_with_the_main_thread(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.Thread()  # one that is not alive
    own = ClipWriter(tmp_path / "clip.mp4", preset="ultrafast")
    begin(own, clip)
    own.add(clip.frames[:10])
    assert own._encoder.is_alive()
    assert not own._encoder.daemon  # else the end of the process would not wait until its file is removed
    monkeypatch.setattr(writer, "main_thread", lambda: main)
    own._encoder.join()
    assert left_in(tmp_path) == []


def test_interrupt_before_the_encoder_starts_leaves_nothing(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread, *, is_after: bool) -> None:
        if is_after:
            start(thread)
        raise KeyboardInterrupt

    for is_after in (False, True):
        monkeypatch.setattr(
            threading.Thread, "start", lambda thread, after=is_after: interrupted(thread, is_after=after)
        )
        with pytest.raises(KeyboardInterrupt), ClipWriter(tmp_path / "clip.mp4") as own:
            begin(own, clip)
        assert left_in(tmp_path) == []
