"""SSRF guard: decides whether a URL that a user gave may be called, and to which address exactly.

`check_url` is the courtesy check at registration; a host that does not resolve just then passes it.
`resolve_pinned` decides at send time, every time: it resolves the host, refuses it if any one address is not
globally routable, and returns the checked address. The sender connects to that address, with `Target.host`
for TLS SNI and the `Host` header, and makes no second look-up, follows no redirect and reads no proxy from
the environment. This module opens no connection.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import SplitResult, urlsplit

import idna

from farm.errors import FarmError

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Sequence[str]]

MAX_URL_CHARS = 2048
MAX_HOST_CHARS = 253
HTTPS_PORTS = frozenset({443, 8443})
HTTP_PORTS = frozenset({80, 8080})  # only where plain http is allowed at all
DEFAULT_PORTS = {"https": 443, "http": 80}

# IANA special-purpose registries (2025), less the anycast blocks that are globally reachable; plus Azure's
# metadata address, which looks public. Python's own `is_global` changes between versions, so the list is
# spelt out.
FORBIDDEN_V4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
GLOBAL_V6 = IPv6Network(
    "2000::/3"
)  # all that IANA has given out as global unicast; everything else is refused
TEREDO = IPv6Network("2001::/32")
SIX_TO_FOUR = IPv6Network("2002::/16")
NAT64 = IPv6Network("64:ff9b::/96")
FORBIDDEN_V6 = (
    IPv6Network(
        "2001::/23"
    ),  # protocol assignments: benchmarking, ORCHID, drone identifiers (Teredo: see above)
    IPv6Network("2001:db8::/32"),
    IPv6Network("3fff::/20"),
)

_V6_NETLOC = re.compile(r"\[[0-9a-f:.]+\](:[0-9]*)?", re.IGNORECASE)
_NUMERIC_LABEL = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)


class UrlRefusedError(FarmError):
    """The URL may not be called; `reason` is a stable word for metrics, the message is for the user."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason beside the sentence."""
        super().__init__("invalid_field", 422, message)
        self.reason = reason


@dataclass(frozen=True)
class Policy:
    """What an operator allows beyond public https addresses.

    An address inside `allow_cidrs` is exempt from the address rules and from the list of ports, so name only
    networks whose every port the users of this farm may reach.
    """

    allow_http: bool = False
    allow_cidrs: tuple[IpNetwork, ...] = ()

    @classmethod
    def from_settings(cls, *, allow_http: bool, allow_cidrs: Iterable[str]) -> "Policy":
        """Parse the networks; a malformed one raises ValueError at start, not at the first webhook."""
        return cls(
            allow_http=allow_http, allow_cidrs=tuple(ipaddress.ip_network(text) for text in allow_cidrs)
        )

    def allows_port(self, scheme: str, port: int) -> bool:
        """Tell whether the port may be called on any public address."""
        return port in HTTPS_PORTS or (scheme == "http" and port in HTTP_PORTS)

    def is_exempt(self, address: IpAddress) -> bool:
        """Tell whether the operator opened the network of this address."""
        return any(address.version == net.version and address in net for net in self.allow_cidrs)


@dataclass(frozen=True)
class Target:
    """Where to connect: the checked address, and what to say there."""

    scheme: str
    ip: str
    host: str  # ASCII, lower case, no brackets; TLS SNI
    port: int
    path: str  # with the query, never empty

    @property
    def host_header(self) -> str:
        """Return the value of the `Host` header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"


@dataclass(frozen=True)
class _Parsed:
    scheme: str
    host: str
    port: int
    path: str
    literal: IpAddress | None


def check_url(url: str, policy: Policy, resolver: Resolver | None = None) -> None:
    """Refuse a URL at registration; a name server that fails is no reason, since only send time decides.

    Raises:
        UrlRefusedError: Scheme, user-info, host, port or an address breaks a rule.
    """
    try:
        resolve_pinned(url, policy, resolver)
    except UrlRefusedError as refused:
        if refused.reason != "dns":
            raise


def resolve_pinned(url: str, policy: Policy, resolver: Resolver | None = None) -> Target:
    """Resolve the host now and return the one address to connect to.

    Args:
        url: As the user registered it.
        policy: What the operator allows.
        resolver: (host, port) -> all addresses as text, best first; the system's by default. It blocks.
    Raises:
        UrlRefusedError: A rule is broken, one address is not globally routable, or the host does not resolve.
    """
    parsed = _parse(url, policy)
    addresses = (
        [parsed.literal] if parsed.literal is not None else _look_up(parsed, resolver or system_resolver)
    )
    _check_addresses(parsed, addresses, policy)
    return Target(parsed.scheme, str(addresses[0]), parsed.host, parsed.port, parsed.path)


def system_resolver(host: str, port: int) -> list[str]:
    """Ask the operating system for every address of the host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def unsafe_because(address: IpAddress) -> str | None:
    """Say why an address is not globally routable, after unwrapping every form that hides a v4 address."""
    if isinstance(address, IPv4Address):
        return "it is in a private or reserved range" if any(address in net for net in FORBIDDEN_V4) else None
    hidden = _hidden_v4(address)
    if hidden is not None:
        return "it hides a private or reserved address" if any(unsafe_because(v4) for v4 in hidden) else None
    if address not in GLOBAL_V6 or any(address in net for net in FORBIDDEN_V6):
        return "it is in a private or reserved range"
    return None


def _hidden_v4(address: IPv6Address) -> tuple[IPv4Address, ...] | None:
    number = int(address)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address in SIX_TO_FOUR:
        return (IPv4Address(number >> 80 & 0xFFFFFFFF),)
    if address in TEREDO:  # the server, and the client with its bits flipped
        return IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(~number & 0xFFFFFFFF)
    if address in NAT64:
        return (IPv4Address(number & 0xFFFFFFFF),)
    return None


def _parse(url: str, policy: Policy) -> _Parsed:
    parts = _split(url)
    scheme = parts.scheme.lower()
    if scheme not in {"https", "http"} or (scheme == "http" and not policy.allow_http):
        allowed = "https or http" if policy.allow_http else "https"
        raise UrlRefusedError("scheme", f"the URL must start with {allowed}:// (got {scheme or 'no scheme'})")
    if "@" in parts.netloc:
        raise UrlRefusedError("user_info", "the URL may not hold a user name or password")
    host, literal = _host(parts)
    port = _port(parts, scheme)
    if not policy.allows_port(scheme, port) and literal is None and not policy.allow_cidrs:
        raise _port_refused(port)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Parsed(scheme, host, port, path, literal)


def _split(url: str) -> SplitResult:
    if len(url) > MAX_URL_CHARS:
        raise UrlRefusedError("length", f"the URL has {len(url)} characters; at most {MAX_URL_CHARS} may be")
    if any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url) or "\\" in url:
        raise UrlRefusedError("syntax", "the URL may hold no blanks, control characters or backslashes")
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise UrlRefusedError("syntax", "the URL cannot be parsed") from exc
    if parts.fragment or "#" in url:
        raise UrlRefusedError("syntax", "the URL may hold no fragment (the part after #)")
    if not (parts.path + parts.query).isascii():
        raise UrlRefusedError("syntax", "path and query must be percent-encoded ASCII")
    return parts


def _port(parts: SplitResult, scheme: str) -> int:
    try:
        port = parts.port
    except ValueError as exc:
        raise UrlRefusedError("port", "the port must be a number from 1 to 65535") from exc
    if port == 0:
        raise UrlRefusedError("port", "the port must be a number from 1 to 65535")
    return DEFAULT_PORTS[scheme] if port is None else port


def _port_refused(port: int) -> UrlRefusedError:
    allowed = ", ".join(str(number) for number in sorted(HTTPS_PORTS))
    return UrlRefusedError("port", f"port {port} is not allowed; use one of {allowed}")


def _host(parts: SplitResult) -> tuple[str, IpAddress | None]:
    raw = parts.hostname or ""
    if "[" in parts.netloc or "]" in parts.netloc:
        return _v6_literal(raw, parts.netloc)
    name = _ascii_host(raw)
    if not _NUMERIC_LABEL.fullmatch(name.rsplit(".", 1)[-1]):
        return name, None
    # A numeric last label makes every libc read the host as an IPv4 address, in decimal, octal or hex, short
    # or long.
    try:
        address = IPv4Address(name)
    except ValueError as exc:
        raise UrlRefusedError("host", "an IPv4 address must be written as four decimal numbers") from exc
    return str(address), address


def _v6_literal(raw: str, netloc: str) -> tuple[str, IpAddress]:
    if not _V6_NETLOC.fullmatch(netloc):
        raise UrlRefusedError("host", "the IPv6 address in the URL is not valid")
    try:
        address = IPv6Address(raw)
    except ValueError as exc:
        raise UrlRefusedError("host", "the IPv6 address in the URL is not valid") from exc
    if address.ipv4_mapped is not None or str(address) != raw:
        raise UrlRefusedError("host", "an IPv6 address must be written in its short canonical form")
    return raw, address


def _ascii_host(raw: str) -> str:
    if not raw:
        raise UrlRefusedError("host", "the URL names no host")
    try:
        name = idna.encode(raw, uts46=True, std3_rules=True, transitional=False).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError) as exc:
        raise UrlRefusedError("host", "the host name in the URL is not valid") from exc
    name = name.removesuffix(".")
    if not name or len(name) > MAX_HOST_CHARS:
        raise UrlRefusedError("host", f"the host name must have 1 to {MAX_HOST_CHARS} characters")
    return name


def _look_up(parsed: _Parsed, resolver: Resolver) -> list[IpAddress]:
    try:
        found = [ipaddress.ip_address(text) for text in resolver(parsed.host, parsed.port)]
    except (OSError, ValueError, UnicodeError) as exc:
        raise UrlRefusedError("dns", f"the host {parsed.host} does not resolve to an address") from exc
    if not found:
        raise UrlRefusedError("dns", f"the host {parsed.host} does not resolve to an address")
    return found


def _check_addresses(parsed: _Parsed, addresses: Sequence[IpAddress], policy: Policy) -> None:
    port_is_open = policy.allows_port(parsed.scheme, parsed.port)
    for address in addresses:
        plain = address.ipv4_mapped if isinstance(address, IPv6Address) and address.ipv4_mapped else address
        if policy.is_exempt(plain):
            continue
        if not port_is_open:
            raise _port_refused(parsed.port)
        reason = unsafe_because(address)
        if reason is not None:
            # The address itself stays out of the sentence: it would turn the guard into a look-up service.
            raise UrlRefusedError(
                "address", f"the host {parsed.host} may not be called: its address is not public"
            )
