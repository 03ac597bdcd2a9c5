import wave

import pytest
from PIL import Image

from farm.media import MediaError, extract_audio, inspect_output, make_sprite_sheet, make_thumbnail
from worker.engines.stock_clip import stock_clip


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(stock_clip(448, 256))
    return path


@pytest.mark.req("F-23")
def test_clip_as_asked_has_no_problems(clip):
    inspection = inspect_output(clip, 448, 256)
    assert inspection.problems == []
    assert inspection.facts.video.nb_frames == 125


@pytest.mark.req("F-23")
def test_other_size_is_a_problem_that_names_both(clip):
    (problem,) = inspect_output(clip, 896, 512).problems
    assert "448x256" in problem
    assert "896x512" in problem


@pytest.mark.req("F-23")
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated_file_is_a_problem(clip, keep):
    data = clip.read_bytes()
    clip.write_bytes(data[: int(len(data) * keep)])
    assert inspect_output(clip, 448, 256).problems


@pytest.mark.parametrize("content", [None, b"", b"no clip at all", b"\0" * 4096])
def test_file_that_is_none_is_a_problem(tmp_path, content):
    path = tmp_path / "x.mp4"
    if content is not None:
        path.write_bytes(content)
    inspection = inspect_output(path, 448, 256)
    assert inspection.facts is None
    assert len(inspection.problems) == 1
    for make in (make_thumbnail, make_sprite_sheet, extract_audio):
        with pytest.raises(MediaError):
            make(path, tmp_path / "x")


@pytest.mark.parametrize(("size", "small"), [((448, 256), (448, 256)), ((896, 512), (480, 274))])
def test_thumbnail_is_a_small_picture_of_the_clip(tmp_path, size, small):
    path = tmp_path / "clip.mp4"
    path.write_bytes(stock_clip(*size))
    assert make_thumbnail(path, tmp_path / "thumb.jpg") == small
    with Image.open(tmp_path / "thumb.jpg") as picture:
        assert (picture.format, picture.size) == ("JPEG", small)
        assert len(set(picture.convert("L").tobytes())) > 50


def test_sprite_sheet_holds_every_fifth_frame_in_order(clip, tmp_path):
    assert make_sprite_sheet(clip, tmp_path / "sprite.jpg") == (5 * 224, 5 * 128)
    with Image.open(tmp_path / "sprite.jpg") as sheet:
        assert sheet.format == "JPEG"
        tiles = [
            sheet.crop((column * 224, row * 128, column * 224 + 224, row * 128 + 128)).tobytes()
            for row in range(5)
            for column in range(5)
        ]
    assert len(set(tiles)) == 25


def test_sound_is_a_wav_of_exactly_ten_seconds(clip, tmp_path):
    extract_audio(clip, tmp_path / "audio.wav")
    with wave.open(str(tmp_path / "audio.wav")) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (2, 2, 44_100)
        assert sound.getnframes() == 441_000
        assert len(set(sound.readframes(44_100))) > 50
