"""Jobs that end at once, and a sender beside the test, on a real database."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from farm.accounts import ensure_account
from farm.db.session import unit_of_work
from farm.db.tables import webhook_attempt, webhook_delivery
from farm.jobs.control import request_cancel
from farm.jobs.job import Job
from farm.jobs.submit import JobWebhook, Submission, submit
from farm.secretbox import seal
from farm.webhooks.endpoints import HMAC, Endpoint, NewEndpoint, create_endpoint
from farm.webhooks.guard import Policy, system_resolver
from farm.webhooks.messages import DEFAULT_EVENT_TYPES
from farm.webhooks.signing import new_secret
from magi2.contract import default_limits, validate
from worker.host_lookup import HostLookups
from worker.webhook_post import make_client
from worker.webhook_sender import Sender, send_until

SECRET = new_secret()
PROMPT = "A paper boat crosses a puddle."
LOOPBACK = Policy.from_settings(allow_http=True, allow_cidrs=["127.0.0.0/8"])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


class Outbox:
    """What a farm does to make deliveries due, and what became of them."""

    def __init__(self, settings, database, account: str = "hooks") -> None:
        self.settings = settings
        self.database = database
        with unit_of_work(database) as conn:
            self.account_id = ensure_account(conn, account)

    def submit(self, url: str | None = None) -> Job:
        """Queue a job; with a URL, its endings are told there."""
        fields = {"prompt": PROMPT, "resolution": "272p", "seed": 7}
        request = validate(fields, limits=default_limits()).request
        sealed = seal(self.settings.secret_key, SECRET)
        hook = JobWebhook(url, DEFAULT_EVENT_TYPES, sealed) if url else None
        submission = Submission(
            account_id=self.account_id,
            request=request,
            profile="tiny-cpu",
            exec_timeout_s=900,
            retention_s=3600,
            webhook=hook,
        )
        with unit_of_work(self.database) as conn:
            return submit(conn, submission)

    def end(self, job_id: str) -> None:
        with unit_of_work(self.database) as conn:
            request_cancel(conn, self.account_id, job_id, "test")

    def cancel_one(self, url: str | None = None) -> str:
        """Queue a job and end it at once, so that whoever subscribed is to be told."""
        job = self.submit(url)
        self.end(job.id)
        return job.id

    def endpoint(self, url: str, **options) -> Endpoint:
        """Make an endpoint of the whole account."""
        new = NewEndpoint(url=url, **{"event_types": DEFAULT_EVENT_TYPES, **options})
        with unit_of_work(self.database) as conn:
            sealed = {HMAC: seal(self.settings.secret_key, SECRET)}
            return create_endpoint(conn, self.account_id, new, sealed)

    def execute(self, statement: str, **values) -> list[sa.Row]:
        with unit_of_work(self.database) as conn:
            result = conn.execute(sa.text(statement), values)
            return list(result.all()) if result.returns_rows else []

    def hurry(self) -> None:
        """Let everything that waits be due now."""
        self.execute("UPDATE webhook_delivery SET next_attempt_at = now() WHERE status = 'pending'")
        self.execute("UPDATE webhook_endpoint SET paused_until = NULL")

    def deliveries(self) -> list[sa.Row]:
        with unit_of_work(self.database) as conn:
            return list(conn.execute(sa.select(webhook_delivery).order_by(webhook_delivery.c.id)))

    def attempts(self) -> list[sa.Row]:
        with unit_of_work(self.database) as conn:
            return list(conn.execute(sa.select(webhook_attempt).order_by(webhook_attempt.c.n)))

    def are(self, *statuses: str) -> Callable[[], bool]:
        return lambda: [row.status for row in self.deliveries()] == list(statuses)

    def tried(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.attempts()) >= count


@contextmanager
def sending(
    settings, database, store, *, policy=LOOPBACK, resolver=system_resolver, tls=None, lookup_s=5.0
) -> Iterator[None]:
    """Run a sender in a thread of this process."""
    stop = threading.Event()

    async def send() -> None:
        async with make_client(256, tls) as client:
            lookups = HostLookups(policy, resolver, timeout_s=lookup_s)
            await send_until(Sender(settings, database, store, client, lookups), stop)

    thread = threading.Thread(target=lambda: asyncio.run(send()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
