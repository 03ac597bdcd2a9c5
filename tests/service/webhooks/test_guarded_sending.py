"""What the guard promises where it counts: when the connection is made."""

import datetime
import json
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from farm.clock import now
from farm.webhooks.guard import Policy
from tests.service.webhooks.receiver import Receiver, answer

pytestmark = pytest.mark.req("F-33")

HOST = "hooks.example"
PRIVATE = "10.9.8.7"
# URLs as a tenant might write them, each with what a resolver would answer for its host.
FORBIDDEN = {
    "a private address": ("https://intranet.example/", [PRIVATE]),
    "one bad address among good ones": ("https://mixed.example/", ["93.184.216.34", PRIVATE]),
    "loopback": ("https://loop.example/", ["127.0.0.1"]),
    "metadata": ("https://meta.example/", ["169.254.169.254"]),
    "carrier NAT": ("https://cgnat.example/", ["100.64.0.1"]),
    "v6 loopback": ("https://six.example/", ["::1"]),
    "v6 local": ("https://ula.example/", ["fd00::1"]),
    "v4-mapped": ("https://mapped.example/", ["::ffff:10.9.8.7"]),
    "6to4": ("https://sixtofour.example/", ["2002:a09:807::1"]),
    "Teredo": ("https://teredo.example/", ["2001:0:5db8:d822:0:ffff:f5f6:f7f8"]),
    "NAT64": ("https://nat64.example/", ["64:ff9b::a09:807"]),
    "decimal": ("https://168364039/", []),
    "octal": ("https://012.011.010.07/", []),
    "hex": ("https://0xa.9.8.7/", []),
    "a short form": ("https://10.9/", []),
    "user info": ("https://user:secret@public.example/", ["93.184.216.34"]),
    "an odd port": ("https://public.example:22/", ["93.184.216.34"]),
    "plain http": ("http://public.example/", ["93.184.216.34"]),
    "a host that does not resolve": ("https://nowhere.example/", []),
}


def watch_connections(monkeypatch) -> list[object]:
    """Return a list that fills with the address of every connection that Python code makes."""
    connected: list[object] = []
    connect = socket.socket.connect
    monkeypatch.setattr(
        socket.socket, "connect", lambda self, address: connected.append(address) or connect(self, address)
    )
    return connected


def test_a_forbidden_target_is_never_connected_to_and_its_address_never_told(
    outbox, send_until_met, monkeypatch
) -> None:
    answers = {url.split("/")[2].split(":")[0]: addresses for url, addresses in FORBIDDEN.values()}
    endpoints = {name: outbox.endpoint(url).id for name, (url, _) in FORBIDDEN.items()}
    outbox.cancel_one()
    connected = watch_connections(monkeypatch)
    send_until_met(outbox.tried(len(FORBIDDEN)), resolver=lambda host, _port: answers[host], policy=Policy())
    rows = outbox.execute(
        "SELECT d.endpoint_id, d.last_error, a.error, a.http_status, a.response_excerpt, a.resolved_ip"
        " FROM webhook_delivery d JOIN webhook_attempt a ON a.delivery_id = d.id"
    )
    reasons = {row.endpoint_id: row.error for row in rows}
    assert {name: reasons[endpoint_id] for name, endpoint_id in endpoints.items()} == {
        **dict.fromkeys(list(FORBIDDEN)[:11], "refused_address"),
        **dict.fromkeys(list(FORBIDDEN)[11:15], "refused_host"),
        "user info": "refused_user_info",
        "an odd port": "refused_port",
        "plain http": "refused_scheme",
        "a host that does not resolve": "dns_failed",
    }
    told = json.dumps([list(row) for row in rows])
    assert not any(address in told for addresses in answers.values() for address in addresses)
    assert connected == []


def test_a_connection_that_is_made_would_be_seen(outbox, receiver, send_until_met, monkeypatch) -> None:
    connected = watch_connections(monkeypatch)
    outbox.cancel_one(receiver.url)
    send_until_met(outbox.are("ok"))
    assert connected == [("127.0.0.1", receiver.port)]


def test_the_checked_address_is_called_under_the_given_name(outbox, receiver, send_until_met) -> None:
    outbox.cancel_one(f"http://{HOST}:{receiver.port}/hook?a=1")
    send_until_met(outbox.are("ok"), resolver=lambda _host, _port: ["127.0.0.1"])
    (got,) = receiver.received
    assert (got.path, got.headers["host"]) == ("/hook?a=1", f"{HOST}:{receiver.port}")
    assert outbox.attempts()[0].resolved_ip == "127.0.0.1"


def test_a_name_that_changes_between_check_and_connect_reaches_the_checked_address(
    outbox, receiver, send_until_met, monkeypatch
) -> None:
    """The resolver of an attacker: a harmless address to whoever checks, another one a moment later."""
    asked = []

    def rebinding(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else [PRIVATE]

    def look_up(host, *arguments, **options):
        assert host != HOST, "a second look-up"
        return getaddrinfo(host, *arguments, **options)

    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    receiver.behaviour = answer(500)
    outbox.cancel_one(f"http://{HOST}:{receiver.port}/hook")
    send_until_met(outbox.tried(1), resolver=rebinding)
    assert len(receiver.received) == len(asked) == 1
    # The next attempt looks again, and is refused.
    outbox.hurry()
    send_until_met(outbox.tried(2), resolver=rebinding)
    assert len(receiver.received) == 1
    assert [row.error for row in outbox.attempts()] == ["http_500", "refused_port"]


def test_a_redirect_to_a_forbidden_place_is_not_followed(outbox, receiver, send_until_met) -> None:
    inner = Receiver()
    receiver.behaviour = answer(307, {"location": inner.url})
    outbox.cancel_one(receiver.url)
    send_until_met(outbox.tried(1))
    inner.close()
    assert inner.received == []
    assert outbox.attempts()[0].error == "http_307"


def test_proxies_of_the_environment_are_ignored(outbox, receiver, send_until_met, monkeypatch) -> None:
    proxy = Receiver()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("NO_PROXY", "")
    outbox.cancel_one(receiver.url)
    send_until_met(outbox.are("ok"))
    proxy.close()
    assert (len(receiver.received), len(proxy.received)) == (1, 0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for one host name, signed by itself, and its file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now() - datetime.timedelta(days=1))
        .not_valid_after(now() + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(encoding))
    return path


@pytest.fixture
def tls_receiver(certificate):
    """A receiver behind TLS that also keeps the names which it is asked for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    asked: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    running = Receiver(tls=context)
    yield running, asked
    running.close()


def trusting(certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def test_tls_is_spoken_with_the_name_of_the_url_at_the_checked_address(
    outbox, tls_receiver, certificate, send_until_met
) -> None:
    running, asked = tls_receiver
    outbox.cancel_one(f"https://{HOST}:{running.port}/hook")
    send_until_met(outbox.are("ok"), resolver=lambda _host, _port: ["127.0.0.1"], tls=trusting(certificate))
    assert asked == [HOST]
    assert running.received[0].headers["host"] == f"{HOST}:{running.port}"


@pytest.mark.parametrize("is_trusted", [True, False], ids=["another name", "an unknown authority"])
def test_a_certificate_that_is_not_the_hosts_is_refused(
    outbox, tls_receiver, certificate, send_until_met, is_trusted
) -> None:
    running, _ = tls_receiver
    host = "other.example" if is_trusted else HOST
    outbox.cancel_one(f"https://{host}:{running.port}/hook")
    context = trusting(certificate) if is_trusted else None
    send_until_met(outbox.tried(1), resolver=lambda _host, _port: ["127.0.0.1"], tls=context)
    assert outbox.attempts()[0].error == "tls_failed"
    assert running.received == []
