"""Tracing without its extra, and with a collector that is away."""

import sys

import pytest

from farm import tracing
from farm.errors import SettingsError
from farm.settings import OtelSettings, Settings


@pytest.fixture
def settings():
    return Settings(
        database_url="postgresql://x/y",
        redis_url="redis://x",
        otel=OtelSettings(endpoint="http://127.0.0.1:9"),
    )


def test_missing_extra_is_named_with_its_remedy(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"\[otel\]"):
        tracing.configure_tracing(settings, service="test")


def test_off_it_imports_nothing(settings):
    tracing.configure_tracing(settings.model_copy(update={"otel": OtelSettings()}), service="test")
    with tracing.submitting("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
        assert tracing.current() is None
