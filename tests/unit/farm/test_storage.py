"""Object keys and header values; the store itself is tested against a real one in the service tier."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.storage import content_disposition, input_key, output_key, sha256_of


def test_input_is_named_by_account_and_digest() -> None:
    assert input_key("acct_1", "ab" * 32) == f"v1/acct_1/in/{'ab' * 32}.png"


@pytest.mark.req("F-20")
def test_output_key_holds_the_day_the_job_and_the_epoch() -> None:
    key = output_key("acct_1", "video_2", 3, "video.mp4", datetime(2026, 2, 1, 23, tzinfo=UTC))
    assert key == "v1/acct_1/out/2026/02/01/video_2/e3/video.mp4"


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert sha256_of(path) == sha256_of(b"abc")


@given(st.text())
def test_disposition_never_lets_a_name_break_out_of_its_quotes(name: str) -> None:
    head, value, tail = content_disposition(name).split('"')
    assert (head, tail) == ("attachment; filename=", "")
    assert value
    assert all(char.isascii() and (char.isalnum() or char in "._-") for char in value)
