"""The Range header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.ranges import Span, UnsatisfiableRangeError, read_range


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-0", Span(0, 0)),
        ("bytes=10-19", Span(10, 19)),
        ("bytes=90-", Span(90, 99)),
        ("bytes=90-1000", Span(90, 99)),
        ("bytes=-10", Span(90, 99)),
        ("bytes=-1000", Span(0, 99)),
        ("bytes= 0-9 ", Span(0, 9)),
        ("bytes=0-9,20-29", None),
        ("bytes=9-0", None),
        ("bytes=-", None),
        ("bytes=", None),
        ("bytes=a-b", None),
        ("items=0-9", None),
        ("bytes=0-9x", None),
        ("bytes=0--9", None),
        ("bytes=" + "9" * 19 + "-", None),
        ("bytes=" + "0-0," * 100_000, None),
        ("bytes=\u0661-\u0662", None),
    ],
)
def test_one_range_is_read_and_everything_else_means_the_whole(header: str | None, span: Span | None) -> None:
    assert read_range(header, 100) == span


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_range_outside_the_file_is_refused(header: str) -> None:
    with pytest.raises(UnsatisfiableRangeError):
        read_range(header, 100)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 150))
def test_range_lies_within_the_file(first: int, last: int, num_bytes: int) -> None:
    for header in (f"bytes={first}-{last}", f"bytes={first}-", f"bytes=-{last}"):
        try:
            span = read_range(header, num_bytes)
        except UnsatisfiableRangeError:
            continue
        assert span is None or (0 <= span.start <= span.end < num_bytes)
