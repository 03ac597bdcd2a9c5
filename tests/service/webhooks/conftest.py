"""A receiver, jobs that end at once, and a sender to be run beside a test."""

from collections.abc import Callable, Iterator

import pytest

from tests.service.webhooks.harness import Outbox, sending, wait_until
from tests.service.webhooks.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def outbox(settings, database) -> Outbox:
    return Outbox(settings, database)


@pytest.fixture
def send_until_met(settings, database, object_store) -> Callable[..., None]:
    """Return a function that runs a sender until a condition holds."""

    def run(condition: Callable[[], object], what: str = "the condition", **options) -> None:
        with sending(settings, database, object_store, **options):
            wait_until(condition, what)

    return run
