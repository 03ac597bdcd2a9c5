"""A driver on the test's own database."""

import pytest

from farm.db.session import make_engine
from tests.service.driver import Driver


@pytest.fixture
def driver(settings):
    """Return a driver with as many connections as concurrency tests need."""
    engine = make_engine(settings, application="test", pool_size=20)
    yield Driver(engine)
    engine.dispose()
