import pytest
from PIL import Image

from farm.media import MediaError, inspect_output, make_thumbnail
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
    with pytest.raises(MediaError):
        make_thumbnail(path, tmp_path / "x.jpg")


@pytest.mark.parametrize(("size", "small"), [((448, 256), (448, 256)), ((896, 512), (480, 274))])
def test_thumbnail_is_a_small_picture_of_the_clip(tmp_path, size, small):
    path = tmp_path / "clip.mp4"
    path.write_bytes(stock_clip(*size))
    assert make_thumbnail(path, tmp_path / "thumb.jpg") == small
    with Image.open(tmp_path / "thumb.jpg") as picture:
        assert (picture.format, picture.size) == ("JPEG", small)
        assert len(set(picture.convert("L").tobytes())) > 50
