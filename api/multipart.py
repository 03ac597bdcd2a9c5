"""Streaming reader of multipart/form-data, and the bracket spelling of nested fields.

`read_form` keeps text parts in memory up to a small limit and spools files to disk, both counted as the bytes
arrive; a body without its closing boundary is an error, never a shorter form. `nest` turns names such as
`extra_params[size]` and `tags[]` into objects and lists and reports every field that came twice. What the
fields mean is not known here.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import IO, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from farm.errors import FarmError
from farm.images import MAX_IMAGE_BYTES, too_many_bytes
from magi2.contract import Problem

MAX_PARTS = 200
MAX_FIELD_BYTES = 1024 * 1024
SPOOL_BYTES = 1024 * 1024
MAX_DEPTH = 4

_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_STEP = re.compile(r"\[([^\[\]]*)\]")


class InvalidMultipartError(FarmError):
    """The body is not the multipart/form-data that its header promises."""

    def __init__(self, message: str) -> None:
        """Take the sentence for the user."""
        super().__init__("invalid_multipart", 400, message)


class PayloadTooLargeError(FarmError):
    """More bytes than are accepted."""

    def __init__(self, what: str, max_bytes: int) -> None:
        """Say what is too large, and the limit."""
        super().__init__("payload_too_large", 413, f"{what} is larger than {max_bytes} bytes")


@dataclass(frozen=True)
class Upload:
    """One file part, rewound; the name that the client gave is not kept."""

    field: str
    media_type: str
    file: IO[bytes]


@dataclass
class Form:
    """Parts in the order of the body; `close` removes the spooled files."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)

    def close(self) -> None:
        """Remove the spooled files."""
        for upload in self.uploads:
            upload.file.close()


async def read_form(chunks: AsyncIterator[bytes], content_type: str) -> Form:
    """Read a whole body; the caller closes the form.

    Raises:
        InvalidMultipartError: No boundary, a malformed part, text that is not UTF-8, too many parts, or no
        end.
        PayloadTooLargeError: A text part over its limit.
        ImageRefusedError: A file over the limit of images.
    """
    reader = _Reader()
    try:
        parser = MultipartParser(_boundary(content_type), reader.callbacks())  # type: ignore[arg-type] # a TypedDict
        async for chunk in chunks:
            parser.write(chunk)
            await reader.write_pending()
        if not reader.is_complete:
            raise InvalidMultipartError("the multipart body ends before its closing boundary")
    except FormParserError as exc:
        reader.form.close()
        raise InvalidMultipartError("the body is not well-formed multipart/form-data") from exc
    except BaseException:
        reader.form.close()
        raise
    for upload in reader.form.uploads:
        upload.file.seek(0)
    return reader.form


def _boundary(content_type: str) -> bytes:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidMultipartError("the Content-Type header of a multipart body must name a boundary")
    return boundary


class _Reader:
    """Callbacks of the push parser; they only collect, `write_pending` touches the disk."""

    def __init__(self) -> None:
        self.form = Form()
        self.is_complete = False
        self._num_parts = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._text = bytearray()
        self._upload: Upload | None = None
        self._upload_bytes = 0
        self._pending: list[tuple[IO[bytes], bytes]] = []

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    async def write_pending(self) -> None:
        """Write what has arrived for files; in a thread once a file lies on disk."""
        pending, self._pending = self._pending, []
        if pending:
            await asyncio.to_thread(_write_all, pending)

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidMultipartError(f"the form has more than {MAX_PARTS} parts")
        self._headers = {}
        self._text = bytearray()
        self._upload = None
        self._upload_bytes = 0

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        options = parse_options_header(disposition)[1]
        if b"name" not in options:
            raise InvalidMultipartError("every part of the form must have a Content-Disposition with a name")
        self._name = _text_of(options[b"name"], "a field name")
        if b"filename" in options:
            media_type = self._headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
            spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 -- closed by Form.close
            self._upload = Upload(self._name, media_type.strip().lower(), spool)
            self.form.uploads.append(self._upload)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._upload is None:
            if len(self._text) + end - start > MAX_FIELD_BYTES:
                raise PayloadTooLargeError(f"the field {self._name[:64]}", MAX_FIELD_BYTES)
            self._text += data[start:end]
            return
        self._upload_bytes += end - start
        if self._upload_bytes > MAX_IMAGE_BYTES:
            raise too_many_bytes()
        self._pending.append((self._upload.file, data[start:end]))

    def _end_part(self) -> None:
        if self._upload is None:
            self.form.fields.append((self._name, _text_of(bytes(self._text), f"the field {self._name[:64]}")))

    def _end(self) -> None:
        self.is_complete = True


def _write_all(pending: list[tuple[IO[bytes], bytes]]) -> None:
    for file, data in pending:
        file.write(data)


def _text_of(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise InvalidMultipartError(f"{what} is not valid UTF-8") from exc


def nest(fields: list[tuple[str, str]]) -> tuple[dict[str, Any], list[Problem]]:
    """Turn flat form fields into members, objects and lists.

    Returns:
        The members (a name whose brackets make no sense stays as it is, to be refused as unknown), and one
        problem for each field that was given twice, be it in one spelling or in two.
    """
    members: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in fields:
        match = _NAME.fullmatch(name)
        steps = _STEP.findall(match[2]) if match else []
        if match is None or len(steps) > MAX_DEPTH or "" in steps[:-1]:
            members[name] = value
        elif not _place(members, [match[1], *steps], value):
            problems.append(given_twice(match[1]))
    return members, problems


def given_twice(name: str) -> Problem:
    """Make the problem of a field that one request holds twice."""
    return Problem(name, "invalid_field", f"{name} is given more than once or in two spellings; give it once")


class _Object(dict[str, Any]):
    """An object made from brackets; a JSON text under the same name is another spelling."""


def _place(members: dict[str, Any], path: list[str], value: str) -> bool:
    """Put a value at its path; False if something is there already."""
    *parents, last = path
    here: Any = members
    for position, step in enumerate(parents):
        is_list = path[position + 1] == ""
        here = here.setdefault(step, [] if is_list else _Object())
        if not isinstance(here, list if is_list else _Object):
            return False
    if isinstance(here, list):
        here.append(value)
        return True
    if last in here:
        return False
    here[last] = value
    return True
