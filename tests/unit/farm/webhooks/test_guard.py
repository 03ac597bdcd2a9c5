"""The SSRF guard: every way to write or hide an address that is not public, and what an operator may open."""

import ipaddress
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.webhooks.guard import (
    FORBIDDEN_V4,
    Policy,
    Target,
    UrlRefusedError,
    check_url,
    resolve_pinned,
    unsafe_because,
)

pytestmark = pytest.mark.req("F-33")

STRICT = Policy()
PUBLIC = "93.184.216.34"
PUBLIC_V6 = "2606:2800:220:1:248:1893:25c8:1946"
BEHIND_V6 = {  # each hides 10.0.0.1
    "v4-mapped": "::ffff:10.0.0.1",
    "6to4": "2002:a00:1::1",
    "Teredo client": "2001:0:5db8:d822:0:ffff:f5ff:fffe",
    "Teredo server": "2001:0:a00:1:0:ffff:a247:27dd",
    "NAT64": "64:ff9b::a00:1",
    "NAT64 of a local network": "64:ff9b:1::a00:1",
    "v4-compatible": "::a00:1",
    "SIIT": "::ffff:0:a00:1",
}


def answering(*addresses: str) -> Callable[[str, int], list[str]]:
    return lambda _host, _port: list(addresses)


def never(_host: str, _port: int) -> list[str]:
    raise AssertionError("nothing may be looked up")


def refused(url: str, policy: Policy = STRICT, resolver: Callable[[str, int], list[str]] = never) -> str:
    with pytest.raises(UrlRefusedError) as caught:
        resolve_pinned(url, policy, resolver)
    return caught.value.reason


def test_public_host_is_pinned_to_its_first_address() -> None:
    target = resolve_pinned("https://Hooks.Example.com/in?a=1", STRICT, answering(PUBLIC, "93.184.216.35"))
    assert target == Target("https", PUBLIC, "hooks.example.com", 443, "/in?a=1")


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("https://example.com", "example.com"),
        ("https://example.com:443/x", "example.com"),
        ("https://example.com:8443/x", "example.com:8443"),
        (f"https://[{PUBLIC_V6}]:8443/", f"[{PUBLIC_V6}]:8443"),
    ],
)
def test_host_header_names_the_port_only_where_it_is_not_the_default(url: str, header: str) -> None:
    assert resolve_pinned(url, STRICT, answering(PUBLIC)).host_header == header


def test_empty_path_becomes_a_slash() -> None:
    assert resolve_pinned("https://example.com?x=1", STRICT, answering(PUBLIC)).path == "/?x=1"


def test_international_host_is_normalised_before_it_is_resolved() -> None:
    asked = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return [PUBLIC]

    assert resolve_pinned("https://BÜCHER.example/", STRICT, resolver).host == "xn--bcher-kva.example"
    assert asked == [("xn--bcher-kva.example", 443)]


@pytest.mark.parametrize(
    "network", [str(net) for net in FORBIDDEN_V4] + ["169.254.169.254/32", "100.100.100.200/32"]
)
def test_both_ends_of_every_special_v4_range_are_refused(network: str) -> None:
    net = ipaddress.IPv4Network(network)
    for address in (net[0], net[-1]):
        assert refused("https://example.com/", resolver=answering(str(address))) == "address"


WRAPPED = {
    "v4-mapped": lambda v4: 0xFFFF << 32 | v4,
    "6to4": lambda v4: 0x2002 << 112 | v4 << 80 | 1,
    "Teredo client": lambda v4: (
        0x2001_0000 << 96 | int(ipaddress.IPv4Address(PUBLIC)) << 64 | v4 ^ 0xFFFF_FFFF
    ),
    "Teredo server": lambda v4: (
        0x2001_0000 << 96 | v4 << 64 | int(ipaddress.IPv4Address(PUBLIC)) ^ 0xFFFF_FFFF
    ),
    "NAT64": lambda v4: 0x64FF9B << 96 | v4,
}


@pytest.mark.parametrize("network", [str(net) for net in FORBIDDEN_V4])
@pytest.mark.parametrize("form", WRAPPED)
def test_both_ends_of_every_special_v4_range_are_refused_in_every_v6_form(network: str, form: str) -> None:
    net = ipaddress.IPv4Network(network)
    for inner in (net[0], net[-1]):
        address = ipaddress.IPv6Address(WRAPPED[form](int(inner)))
        assert refused("https://example.com/", resolver=answering(str(address))) == "address"
        assert refused("https://example.com/", resolver=answering(PUBLIC, str(address))) == "address"


@pytest.mark.parametrize("form", WRAPPED)
def test_every_v6_form_of_a_public_address_is_told_apart(form: str) -> None:
    public = ipaddress.IPv6Address(WRAPPED[form](int(ipaddress.IPv4Address(PUBLIC))))
    assert unsafe_because(public) is None


@pytest.mark.parametrize(
    "address",
    [
        "::",
        "::1",
        "fe80::1",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "100::1",
        "2001:db8::1",
        "3fff::1",
        "5f00::1",
        "2001:2::1",
        "2001:20::1",
        "4000::1",
    ],
)
def test_special_v6_ranges_are_refused(address: str) -> None:
    assert refused("https://example.com/", resolver=answering(address)) == "address"


@pytest.mark.parametrize("address", BEHIND_V6.values(), ids=BEHIND_V6.keys())
def test_private_v4_inside_a_v6_form_is_refused(address: str) -> None:
    assert refused("https://example.com/", resolver=answering(address)) == "address"


@pytest.mark.parametrize(
    "address", [f"::ffff:{PUBLIC}", "2002:5db8:d822::1", "64:ff9b::5db8:d822", PUBLIC_V6]
)
def test_public_address_in_a_v6_form_is_allowed(address: str) -> None:
    assert unsafe_because(ipaddress.IPv6Address(address)) is None


@given(st.integers(0, 2**32 - 1))
def test_the_list_of_special_ranges_refuses_whatever_the_standard_library_calls_private(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    assert not (address.is_private or address.is_multicast or address.is_reserved) or unsafe_because(address)


@given(st.integers(0, 2**32 - 1))
def test_every_v6_form_is_judged_by_the_v4_address_inside(number: int) -> None:
    inner = ipaddress.IPv4Address(number)
    for wrapped in (0xFFFF << 32 | number, 0x2002 << 112 | number << 80, 0x64FF9B << 96 | number):
        outcome = unsafe_because(ipaddress.IPv6Address(wrapped))
        assert (outcome is None) == (unsafe_because(inner) is None)


def test_one_bad_address_refuses_the_host() -> None:
    assert refused("https://example.com/", resolver=answering(PUBLIC, "127.0.0.1")) == "address"


def test_refusal_does_not_tell_the_address() -> None:
    with pytest.raises(UrlRefusedError) as caught:
        resolve_pinned("https://intranet.example/", STRICT, answering("10.1.2.3"))
    assert "10.1.2.3" not in caught.value.message


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "127.0.0.0x1",
        "127.0.0.01",
        "0",
        "1.2.3.4.5",
        "256.1.1.1",
        "93.184.216.034",
    ],
)
def test_ipv4_in_any_but_the_canonical_form_is_refused_without_a_lookup(host: str) -> None:
    assert refused(f"https://{host}/") == "host"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1.", "10.0.0.1", "127。0。0。1", "①②⑦.⓪.⓪.①", "[::1]", "[fd00::1]"]
)
def test_literal_private_address_is_refused_without_a_lookup(host: str) -> None:
    assert refused(f"https://{host}/") == "address"


@pytest.mark.parametrize(
    "host",
    [
        "[0:0:0:0:0:0:0:1]",
        "[2606:2800:220:0001:248:1893:25c8:1946]",
        f"[::ffff:{PUBLIC}]",
        "[fe80::1%25eth0]",
        "[v1.fe]",
        "[::1]x",
        "[]",
    ],
)
def test_ipv6_literal_in_any_but_the_canonical_form_is_refused(host: str) -> None:
    assert refused(f"https://{host}/") in {"host", "syntax"}


def test_public_literal_is_allowed_without_a_lookup() -> None:
    assert resolve_pinned(f"https://{PUBLIC}/", STRICT, never).ip == PUBLIC


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/", "scheme"),
        ("ftp://example.com/", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("example.com/", "scheme"),
        ("", "scheme"),
        ("https://user@example.com/", "user_info"),
        ("https://user:pw@example.com/", "user_info"),
        ("https://@example.com/", "user_info"),
        ("https:///path", "host"),
        ("https://", "host"),
        ("https://a..b/", "host"),
        ("https://-a.example/", "host"),
        ("https://a_b.example/", "host"),
        ("https://%31%32%37.0.0.1/", "host"),
        ("https://" + "a." * 130 + "example/", "host"),
        ("https://example.com:22/", "port"),
        ("https://example.com:80/", "port"),
        ("https://example.com:0/", "port"),
        ("https://example.com:99999/", "port"),
        ("https://example.com:4 43/", "syntax"),
        ("https://example.com:+443/", "port"),
        ("https://example.com\\@127.0.0.1/", "syntax"),
        ("https://example.com/a b", "syntax"),
        ("https://example.com/\r\nHost: x", "syntax"),
        ("https://exa\tmple.com/", "syntax"),
        ("https://example.com/#frag", "syntax"),
        ("https://example.com/#", "syntax"),
        ("https://example.com/ü", "syntax"),
        ("https://[::1", "syntax"),
        ("https://example.com/" + "a" * 2048, "length"),
    ],
)
def test_malformed_or_forbidden_url_is_refused_before_any_lookup(url: str, reason: str) -> None:
    assert refused(url) == reason


@given(st.text(max_size=60))
def test_any_text_is_either_refused_or_pinned(text: str) -> None:
    for url in (text, f"https://{text}", f"https://{text}.example/"):
        try:
            assert resolve_pinned(url, STRICT, answering(PUBLIC)).ip
        except UrlRefusedError as refusal:
            assert refusal.message  # noqa: PT017 - the property is that nothing else escapes


def test_host_that_does_not_resolve_is_refused_at_send_time() -> None:
    def failing(_host: str, _port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    assert refused("https://example.com/", resolver=failing) == "dns"
    assert refused("https://example.com/", resolver=answering()) == "dns"
    check_url("https://example.com/", STRICT, failing)


def test_registration_refuses_a_host_that_resolves_to_a_private_address() -> None:
    with pytest.raises(UrlRefusedError):
        check_url("https://intranet.example/", STRICT, answering("192.168.0.9"))


def test_system_resolver_finds_loopback_behind_localhost() -> None:
    with pytest.raises(UrlRefusedError) as caught:
        check_url("https://localhost/", STRICT)
    assert caught.value.reason == "address"


LOOPBACK = Policy.from_settings(allow_http=True, allow_cidrs=["127.0.0.0/8", "::1/128"])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:9000/hook", "127.0.0.1"),
        ("http://[::1]:9000/", "::1"),
        ("http://localhost:41234/", "127.0.0.1"),
    ],
)
def test_allowed_network_is_exempt_from_addresses_and_ports(url: str, address: str) -> None:
    assert resolve_pinned(url, LOOPBACK, answering(address)).ip == address


def test_exemption_covers_the_named_network_only() -> None:
    assert refused("https://example.com/", LOOPBACK, answering("127.0.0.1", "10.0.0.1")) == "address"
    assert refused("https://example.com:9000/", LOOPBACK, answering(PUBLIC)) == "port"
    assert refused("https://[2002:7f00:1::1]/", LOOPBACK) == "address"


def test_mapped_form_of_an_allowed_address_is_allowed() -> None:
    assert resolve_pinned("http://localhost/", LOOPBACK, answering("::ffff:127.0.0.1")).ip


def test_plain_http_is_opened_with_its_own_ports_only() -> None:
    policy = Policy(allow_http=True)
    assert resolve_pinned("http://example.com/", policy, answering(PUBLIC)).port == 80
    assert refused("https://example.com:80/", policy, answering(PUBLIC)) == "port"
