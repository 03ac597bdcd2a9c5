"""Reading what a receiver answers, and where a POST goes."""

import ssl
from datetime import timedelta
from email.utils import format_datetime

import httpx
import pytest

from farm.clock import now
from farm.webhooks.guard import Target
from worker.webhook_post import pinned_url, retry_after_s, transport_error


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120", 120.0), (" 7 ", 7.0), ("0", 0.0), ("9" * 30, 999_999_999.0)],
)
def test_retry_after_in_seconds_is_read(text: str, seconds: float) -> None:
    assert retry_after_s({"retry-after": text}) == seconds


def test_retry_after_as_a_date_is_read_and_the_past_is_now() -> None:
    later = format_datetime(now() + timedelta(seconds=90), usegmt=True)
    assert retry_after_s({"retry-after": later}) == pytest.approx(90, abs=2)
    earlier = format_datetime(now() - timedelta(days=1), usegmt=True)
    assert retry_after_s({"retry-after": earlier}) == 0.0


@pytest.mark.parametrize("text", ["", "soon", "-5", "1e9", "\u0663", "Mon, 99 Foo 2026 00:00:00 GMT"])
def test_retry_after_that_makes_no_sense_is_none(text: str) -> None:
    assert retry_after_s({"retry-after": text}) is None


@pytest.mark.parametrize(
    ("ip", "url"),
    [("93.184.216.34", "https://93.184.216.34:8443/in?a=1"), ("2606::1", "https://[2606::1]:8443/in?a=1")],
)
def test_the_url_names_the_checked_address(ip: str, url: str) -> None:
    assert pinned_url(Target("https", ip, "hooks.example", 8443, "/in?a=1")) == url


def test_errors_become_words_without_addresses() -> None:
    handshake = httpx.ConnectError("[SSL] 10.0.0.7")
    handshake.__cause__ = OSError()
    handshake.__cause__.__cause__ = ssl.SSLCertVerificationError("certificate verify failed")
    words = [
        transport_error(error)
        for error in (
            handshake,
            httpx.ConnectTimeout("10.0.0.7"),
            httpx.ConnectError("10.0.0.7"),
            httpx.ReadTimeout("10.0.0.7"),
            httpx.RemoteProtocolError("10.0.0.7"),
            httpx.InvalidURL("10.0.0.7"),
        )
    ]
    expected = ["tls_failed", "connect_timeout", "connect_failed", "timeout", "connection_broken"]
    assert words == [*expected, "refused_syntax"]
