"""Who may read metrics, and the server of ticker and worker."""

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from farm.embedded.ports import free_ports
from farm.healthcheck import is_healthy
from farm.metrics.exporter import MetricsServer, may_read
from farm.settings import MetricsSettings

TOKEN = SecretStr("scrape-token-0123456789")


@pytest.mark.parametrize(
    ("token", "authorization", "client", "is_forwarded", "expected"),
    [
        (None, None, "127.0.0.1", False, True),
        (None, None, "::1", False, True),
        (None, None, "10.0.0.1", False, False),
        (None, None, "127.0.0.1", True, False),
        (None, None, None, False, False),
        (TOKEN, None, "127.0.0.1", False, False),
        (TOKEN, "Bearer wrong", "127.0.0.1", False, False),
        (TOKEN, f"Bearer {TOKEN.get_secret_value()}", "10.0.0.1", True, True),
    ],
)
def test_a_token_decides_and_without_one_this_host_alone(
    token, authorization, client, is_forwarded, expected
):
    assert may_read(token, authorization, client, is_forwarded=is_forwarded) is expected


def test_an_open_address_needs_a_token():
    with pytest.raises(ValidationError, match="FARM_METRICS__TOKEN"):
        MetricsSettings(host="0.0.0.0", port=9100)
    assert MetricsSettings(host="0.0.0.0", port=9100, token=TOKEN).port == 9100


@pytest.mark.parametrize(("is_ready", "expected"), [(True, 200), (False, 503)])
def test_readiness_is_the_role_s_and_needs_no_token(is_ready, expected):
    port = free_ports(1)[0]
    server = MetricsServer(MetricsSettings(port=port, token=TOKEN), lambda: is_ready)
    try:
        with httpx.Client(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/readyz").status_code == expected
            assert client.get("/livez").status_code == 200
        assert is_healthy(f"http://127.0.0.1:{port}/readyz") is is_ready
    finally:
        server.close()
    assert not is_healthy(f"http://127.0.0.1:{port}/readyz")


def test_the_server_answers_a_scrape_and_refuses_a_stranger():
    port = free_ports(1)[0]
    server = MetricsServer(MetricsSettings(port=port, token=TOKEN), lambda: True)
    try:
        url = f"http://127.0.0.1:{port}/metrics"
        with httpx.Client(trust_env=False) as client:
            assert client.get(url).status_code == 401
            answer = client.get(url, headers={"Authorization": f"Bearer {TOKEN.get_secret_value()}"})
            assert client.get(url.replace("metrics", "other")).status_code == 404
        assert answer.status_code == 200
        assert "magi2_attempts_total" in answer.text
    finally:
        server.close()


def test_no_port_means_no_server():
    MetricsServer(MetricsSettings(), lambda: True).close()
