"""What is written: exact facts, colours, sound, equal bytes, and nothing at all when a part fails."""

import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from magi2.errors import EngineError, InvalidInput
from magi2.media import mp4
from magi2.media.clip import Clip
from magi2.media.mp4 import unfinished_file, write_mp4
from magi2.media.probe import breaches, probe
from tests.unit.magi2.media.conftest import moving_clip


def written_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def decoded(path: Path) -> list[np.ndarray]:
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_file_keeps_the_contract_and_nothing_else_is_left(tmp_path: Path, clip: Clip) -> None:
    path = tmp_path / "clip.mp4"
    write_mp4(path, clip, preset="ultrafast")
    assert breaches(probe(path), 96, 64) == []
    assert written_files(tmp_path) == ["clip.mp4"]


def test_existing_file_is_replaced(tmp_path: Path, clip: Clip) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    write_mp4(path, clip, preset="ultrafast")
    assert breaches(probe(path), 96, 64) == []


def test_pictures_are_tagged_as_they_were_converted(written: Path) -> None:
    video = probe(written).video
    assert video is not None
    tags = (video.color_space, video.color_primaries, video.color_transfer, video.color_range)
    assert tags == ("smpte170m", "smpte170m", "smpte170m", "tv")


@pytest.mark.parametrize(
    ("colour", "luma_and_chroma"),
    # BT.601 in limited range; with BT.709 red would be (63, 102, 240).
    [((255, 0, 0), (81, 90, 240)), ((0, 255, 0), (145, 54, 34)), ((0, 0, 255), (41, 240, 110)),
     ((255, 255, 255), (235, 128, 128)), ((0, 0, 0), (16, 128, 128))],
)  # fmt: skip
def test_colours_are_converted_with_bt601(
    tmp_path: Path, colour: tuple[int, ...], luma_and_chroma: tuple[int, ...]
) -> None:
    frames = torch.tensor(colour, dtype=torch.uint8).expand(125, 64, 64, 3)
    path = tmp_path / "flat.mp4"
    write_mp4(path, Clip(frames, torch.zeros(441_000, 2)), preset="ultrafast")
    with av.open(path) as container:
        frame = next(container.decode(video=0))
        planes = [np.frombuffer(plane, np.uint8)[0] for plane in frame.planes]
    assert max(abs(int(a) - b) for a, b in zip(planes, luma_and_chroma, strict=True)) <= 1


def test_frames_come_back_in_order(written: Path, clip: Clip) -> None:
    frames = decoded(written)
    assert len(frames) == 125
    for index in (0, 1, 62, 124):
        want = clip.frames[index].numpy().astype(int)
        errors = [np.abs(frame.astype(int) - want).mean() for frame in frames]
        assert int(np.argmin(errors)) == index


def test_sound_comes_back_at_its_place_and_level(written: Path, clip: Clip) -> None:
    with av.open(written) as container:
        parts = [frame.to_ndarray() for frame in container.decode(audio=0)]
    samples = torch.from_numpy(np.concatenate(parts, axis=1))[:, :441_000]
    assert samples.shape == (2, 441_000)
    inner = slice(4000, 437_000)
    # A shift by the encoder's priming of 1024 samples would give an error of the size of the tone.
    assert (samples[:, inner] - clip.samples.T[:, inner]).abs().mean() < 0.02


def test_samples_beyond_full_scale_are_clipped(tmp_path: Path) -> None:
    path = tmp_path / "loud.mp4"
    loud = Clip(torch.zeros(125, 64, 64, 3, dtype=torch.uint8), torch.full((441_000, 2), 5.0))
    write_mp4(path, loud, preset="ultrafast")
    with av.open(path) as container:
        assert max(abs(frame.to_ndarray()).max() for frame in container.decode(audio=0)) < 1.6


def boxes(data: bytes, path: tuple[bytes, ...]) -> Iterator[bytes]:
    """Yield the contents of every box of an mp4 at a path of box kinds."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == path[0]:
            content = data[at + 8 : at + size]
            if len(path) == 1:
                yield content
            else:
                yield from boxes(content, path[1:])
        at += max(size, 8)


def test_edit_list_cuts_the_priming_of_the_encoder(written: Path) -> None:
    data = written.read_bytes()
    lists = list(boxes(data, (b"moov", b"trak", b"edts", b"elst")))
    # version and flags, count, then (length in thousandths of a second, first media time, rate)
    sound = struct.unpack_from(">IIIiI", lists[1])
    assert sound[1:4] == (1, 10_000, 1024)


def test_index_stands_in_front_of_the_media(written: Path) -> None:
    data = written.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


def test_equal_clips_give_equal_bytes(tmp_path: Path) -> None:
    clip = moving_clip(192, 128)
    files = [tmp_path / "a.mp4", tmp_path / "b.mp4", tmp_path / "c.mp4"]
    for path in files:
        write_mp4(path, clip)  # the default preset uses every tool of the encoder
    assert len({path.read_bytes() for path in files}) == 1


@pytest.mark.parametrize("size", [(442, 250), (64, 66), (96, 64)])
def test_output_size_is_exact_even_off_the_macroblock_grid(
    tmp_path: Path, clip: Clip, size: tuple[int, int]
) -> None:
    path = tmp_path / "sized.mp4"
    write_mp4(path, Clip(clip.frames, clip.samples, size), preset="ultrafast")
    assert breaches(probe(path), *size) == []
    assert decoded(path)[0].shape == (size[1], size[0], 3)


@pytest.mark.parametrize("size", [(65, 64), (64, 65)])
def test_odd_size_is_refused(tmp_path: Path, clip: Clip, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match=f"the video size {size[0]}x{size[1]} is odd"):
        write_mp4(tmp_path / "odd.mp4", Clip(clip.frames, clip.samples, size))
    assert written_files(tmp_path) == []


@pytest.mark.parametrize("crf", [-1, 52])
def test_quality_out_of_range_is_refused(tmp_path: Path, clip: Clip, crf: int) -> None:
    with pytest.raises(InvalidInput, match=f"crf is {crf}; it must be from 0"):
        write_mp4(tmp_path / "clip.mp4", clip, crf=crf)


def test_lower_crf_makes_a_larger_file(tmp_path: Path) -> None:
    noise = torch.randint(
        0, 256, (125, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    clip = Clip(noise, torch.zeros(441_000, 2))
    for crf in (10, 30):
        write_mp4(tmp_path / f"{crf}.mp4", clip, crf=crf, preset="ultrafast")
    assert (tmp_path / "10.mp4").stat().st_size > 1.5 * (tmp_path / "30.mp4").stat().st_size


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_leave_no_file(tmp_path: Path, clip: Clip, value: float) -> None:
    samples = clip.samples.clone()
    samples[1000, 1] = value
    with pytest.raises(EngineError, match="samples that are not finite"):
        write_mp4(tmp_path / "clip.mp4", Clip(clip.frames, samples))
    assert written_files(tmp_path) == []


@pytest.mark.parametrize("codec", ["_VIDEO_CODEC", "_AUDIO_CODEC"])
def test_failure_to_open_an_encoder_leaves_no_file(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(mp4, codec, "no_such_encoder")
    with pytest.raises(EngineError, match=r"clip\.mp4: the clip could not be encoded"):
        write_mp4(tmp_path / "clip.mp4", clip)
    assert written_files(tmp_path) == []


@pytest.mark.parametrize(("track", "left"), [("_sounds", 100), ("_pictures", 100)])
def test_track_that_ends_early_fails_the_whole_file(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch, track: str, left: int
) -> None:
    whole = getattr(mp4, track)
    monkeypatch.setattr(
        mp4, track, lambda source: (part for part, _ in zip(whole(source), range(left), strict=False))
    )
    with pytest.raises(EngineError, match="could not be encoded or written"):
        write_mp4(tmp_path / "clip.mp4", clip, preset="ultrafast")
    assert written_files(tmp_path) == []


def test_file_that_breaks_the_contract_is_not_published(
    tmp_path: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mp4, "_AUDIO_CODEC", "ac3")
    with pytest.raises(EngineError, match=r"breaks the output contract: .*codec is ac3, not aac"):
        write_mp4(tmp_path / "clip.mp4", clip, preset="ultrafast")
    assert written_files(tmp_path) == []


def test_full_disk_leaves_no_file(tmp_path: Path, clip: Clip) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(EngineError, match="could not be encoded or written"):
            write_mp4(tmp_path / "clip.mp4", clip, preset="ultrafast")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert written_files(tmp_path) == []


def test_folder_that_is_not_there_is_an_engine_error(tmp_path: Path, clip: Clip) -> None:
    with pytest.raises(EngineError, match="could not be encoded or written"):
        write_mp4(tmp_path / "gone" / "clip.mp4", clip, preset="ultrafast")


@pytest.mark.parametrize("name", ["x" * 217, "x" * 255, "clip.mp4"])
def test_name_of_any_legal_length_is_given(tmp_path: Path, written: Path, name: str) -> None:
    with unfinished_file(tmp_path / name, (96, 64)) as unfinished:
        shutil.copy(written, unfinished)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_link_is_followed_and_stays(tmp_path: Path, written: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.mp4").symlink_to("real/clip.mp4")
    for _ in range(2):
        with unfinished_file(tmp_path / "link.mp4", (96, 64)) as unfinished:
            shutil.copy(written, unfinished)
        assert (tmp_path / "link.mp4").is_symlink()
        assert (tmp_path / "real/clip.mp4").read_bytes() == written.read_bytes()
        assert [path.name for path in (tmp_path / "real").iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize("given", [".", "", "/", "/dev/null", "/dev/null/clip.mp4"])
def test_what_is_no_place_for_a_file_is_an_engine_error(clip: Clip, given: str) -> None:
    with pytest.raises(EngineError, match="could not be encoded or written"):
        write_mp4(Path(given), clip, preset="ultrafast")


def write_and(meanwhile: Callable[[], object], path: Path, written: Path) -> None:
    with unfinished_file(path, (96, 64)) as unfinished:
        shutil.copy(written, unfinished)
        meanwhile()


@pytest.mark.parametrize("is_file", [False, True], ids=["gone", "a file now"])
def test_folder_that_is_lost_meanwhile_is_an_engine_error(
    tmp_path: Path, written: Path, *, is_file: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def lose() -> None:
        shutil.rmtree(folder)
        if is_file:
            folder.touch()

    with pytest.raises(EngineError, match="could not be encoded or written"):
        write_and(lose, folder / "clip.mp4", written)


def test_folder_in_the_place_of_the_file_is_an_engine_error(tmp_path: Path, written: Path) -> None:
    with pytest.raises(EngineError, match="Is a directory"):
        write_and((tmp_path / "clip.mp4").mkdir, tmp_path / "clip.mp4", written)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
