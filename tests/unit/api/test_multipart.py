"""Streaming multipart: what is read, what is refused, and how bracket names become objects."""

import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import multipart
from api.multipart import Form, InvalidMultipartError, PayloadTooLargeError, nest, read_form
from farm.images import ImageRefusedError

CONTENT_TYPE = "multipart/form-data; boundary=XX"
IMAGE_HEAD = (
    'Content-Disposition: form-data; name="input_reference"; filename="a.png"\r\nContent-Type: image/png'
)


def part(head: str, body: bytes) -> bytes:
    return b"--XX\r\n" + head.encode() + b"\r\n\r\n" + body + b"\r\n"


def text_part(name: str, value: str) -> bytes:
    return part(f'Content-Disposition: form-data; name="{name}"', value.encode())


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def read(*parts: bytes, end: bytes = b"--XX--\r\n", size: int = 1 << 20) -> Form:
    return await read_form(pieces(b"".join(parts) + end, size), CONTENT_TYPE)


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
async def test_parts_are_read_whatever_the_pieces_they_arrive_in(size: int) -> None:
    form = await read(text_part("prompt", "Füchse"), part(IMAGE_HEAD, b"\x89PNG\r\n--X"), size=size)
    assert form.fields == [("prompt", "Füchse")]
    (upload,) = form.uploads
    assert (upload.field, upload.media_type, upload.file.read()) == (
        "input_reference",
        "image/png",
        b"\x89PNG\r\n--X",
    )
    form.close()


async def test_empty_form_has_no_fields() -> None:
    assert (await read()).fields == []


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; charset=x"],
)
async def test_header_without_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidMultipartError, match="boundary"):
        await read_form(pieces(b"", 1), content_type)


@pytest.mark.parametrize("end", [b"", b"--X", b"--XX", b"--XX-"])
async def test_body_without_its_closing_boundary_is_refused(end: bytes) -> None:
    with pytest.raises(InvalidMultipartError, match="closing boundary"):
        await read(text_part("prompt", "a fox"), end=end)


@pytest.mark.parametrize(
    "data", [b"garbage", b"--YY\r\n\r\n", b"--XX\r\nno header\r\n\r\n--XX--", b"\r\n\r\n"]
)
async def test_malformed_body_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMultipartError):
        await read_form(pieces(data, 1 << 20), CONTENT_TYPE)


async def test_overlong_boundary_is_refused() -> None:
    with pytest.raises(InvalidMultipartError):
        await read_form(pieces(b"", 1), f"multipart/form-data; boundary={'b' * 5000}")


async def test_part_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidMultipartError, match="name"):
        await read(part("Content-Disposition: form-data", b"x"))


async def test_text_that_is_not_utf8_is_refused_not_guessed() -> None:
    with pytest.raises(InvalidMultipartError, match="UTF-8"):
        await read(part('Content-Disposition: form-data; name="prompt"', b"\xff\xfe"))


async def test_too_many_parts_are_refused() -> None:
    with pytest.raises(InvalidMultipartError, match="200 parts"):
        await read(*[text_part("a", "b")] * 201)


async def test_long_text_part_is_refused() -> None:
    with pytest.raises(PayloadTooLargeError):
        await read(text_part("prompt", "a" * (1 << 20) + "b"), size=4096)


@pytest.fixture
def closed_spools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    made: list[tempfile.SpooledTemporaryFile[bytes]] = []
    real = tempfile.SpooledTemporaryFile

    def spy(**options: int) -> tempfile.SpooledTemporaryFile[bytes]:
        made.append(real(**options))
        return made[-1]

    monkeypatch.setattr(multipart.tempfile, "SpooledTemporaryFile", spy)
    states: list[bool] = []
    yield states
    states.extend(file.closed for file in made)
    assert states
    assert all(states)


async def test_file_over_the_limit_is_refused_while_it_arrives(closed_spools: list[bool]) -> None:
    read_bytes = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read_bytes
        yield b"--XX\r\n" + IMAGE_HEAD.encode() + b"\r\n\r\n"
        while True:
            read_bytes += 1 << 20
            yield bytes(1 << 20)

    with pytest.raises(ImageRefusedError) as caught:
        await read_form(endless(), CONTENT_TYPE)
    assert caught.value.http_status == 413
    assert read_bytes <= 22 << 20
    assert closed_spools == []


async def test_spooled_files_are_removed_when_the_body_breaks_off(closed_spools: list[bool]) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"--XX\r\n" + IMAGE_HEAD.encode() + b"\r\n\r\nabc"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await read_form(broken(), CONTENT_TYPE)
    assert closed_spools == []


@given(data=st.binary(max_size=300), size=st.integers(1, 64))
async def test_any_bytes_are_read_or_refused(data: bytes, size: int) -> None:
    for whole in (data, b"--XX\r\n" + data, text_part("a", "b") + data + b"--XX--"):
        try:
            (await read_form(pieces(whole, size), CONTENT_TYPE)).close()
        except InvalidMultipartError as refusal:
            assert refusal.http_status == 400  # noqa: PT017 -- nothing else may escape


@pytest.mark.req("F-14")
class TestNesting:
    """Names with brackets, as the OpenAI SDK flattens nested objects."""

    def test_measured_spelling_of_the_sdk_becomes_objects_and_lists(self) -> None:
        fields = [
            ("prompt", "a fox"),
            ("extra_params[resolution]", "272p"),
            ("extra_params[deterministic]", "true"),
            ("tags[]", "a"),
            ("tags[]", "b"),
            ("webhook[events][]", "video.completed"),
            ("webhook[url]", "https://example.com/"),
        ]
        assert nest(fields) == (
            {
                "prompt": "a fox",
                "extra_params": {"resolution": "272p", "deterministic": "true"},
                "tags": ["a", "b"],
                "webhook": {"events": ["video.completed"], "url": "https://example.com/"},
            },
            [],
        )

    @pytest.mark.parametrize(
        "fields",
        [
            [("a", "1"), ("a", "1")],
            [("a[b]", "1"), ("a[b]", "1")],
            [("a", '{"b": 1}'), ("a[b]", "1")],
            [("a[b]", "1"), ("a", '{"b": 1}')],
            [("a[b]", "1"), ("a[]", "1")],
            [("a[b][c]", "1"), ("a[b]", "1")],
        ],
    )
    def test_field_in_two_spellings_is_a_problem(self, fields: list[tuple[str, str]]) -> None:
        (problem,) = nest(fields)[1]
        assert (problem.field, problem.code) == ("a", "invalid_field")

    @pytest.mark.parametrize("name", ["[a]", "a[b", "a]b", "a[b]c", "a[][b]", "a[b][c][d][e][f]", "", "[]"])
    def test_name_whose_brackets_make_no_sense_stays_as_it_is(self, name: str) -> None:
        assert nest([(name, "1")]) == ({name: "1"}, [])

    @given(st.lists(st.tuples(st.text("ab[]", max_size=8), st.text(max_size=3)), max_size=8))
    def test_every_value_is_placed_or_reported(self, fields: list[tuple[str, str]]) -> None:
        members, problems = nest(fields)
        assert _num_leaves(members) + len(problems) >= len({name for name, _ in fields})


def _num_leaves(value: object) -> int:
    if isinstance(value, dict):
        return sum(_num_leaves(entry) for entry in value.values())
    return len(value) if isinstance(value, list) else 1
