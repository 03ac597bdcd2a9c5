"""The webhook sender: takes due deliveries, posts each once, records what came of it.

Promises: a message keeps its id over every retry, so a receiver can drop repeats; the address that was
checked is the address that is called; a slow receiver holds up nobody else, since every delivery is its own
coroutine with a total time limit, endpoints that have been failing for a while have places of their own, and
no account takes them all. A sender that is killed between POST and record leaves a lease behind, and the
delivery goes out again when that ends. Runs as one thread of the ticker; any number of tickers may run.

The event loop does nothing but network: the database, presigning and decryption are in one thread of their
own, look-ups in others.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import structlog
from pydantic import SecretStr
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError

from farm.clock import monotonic_s
from farm.db.session import make_engine, unit_of_work
from farm.errors import FarmError
from farm.metrics.families import WEBHOOK_ATTEMPTS, WEBHOOK_BLOCKED, WEBHOOK_SECONDS
from farm.secretbox import unseal
from farm.settings import Settings
from farm.storage import ObjectStore
from farm.tracing import trace_webhook
from farm.webhooks.deliveries import (
    LEASE_S,
    Delivery,
    Outcome,
    Recorded,
    Result,
    Room,
    reclaim,
    record,
    take_due,
)
from farm.webhooks.guard import Policy, UrlRefusedError
from farm.webhooks.payload import body_bytes
from farm.webhooks.signing import sign
from worker.host_lookup import HostLookups
from worker.webhook_post import Post, make_client, transport_error

log = structlog.get_logger(__name__)

REFUSED = "refused_"  # by the guard
IDLE_S = 0.5
BROKEN_S = 1.0
RECLAIM_EVERY_S = 1.0
GOODBYE_S = 8.0  # the ticker waits a little longer
# Places on the wire. An endpoint that fails for longer than a minute uses the second kind only.
HEALTHY_PLACES = 192
FAILING_PLACES = 64
PLACES_PER_ACCOUNT = 96
# A lease must outlive an attempt, its record, and a database that is away for a moment.
LEASE_MARGIN_S = 45.0


@dataclass(frozen=True)
class Prepared:
    """A delivery with its bytes and its secrets, so that sending needs nothing but the network."""

    delivery: Delivery
    body: bytes
    secrets: list[str]


class Sender:
    """Everything that attempts need; made once for the life of the thread."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        store: ObjectStore,
        client: httpx.AsyncClient,
        lookups: HostLookups,
    ) -> None:
        """Keep the parts."""
        settings.require("secret_key")
        self._settings = settings
        self._secret_key = settings.secret_key or SecretStr("")
        self._engine = engine
        self._store = store
        self._client = client
        self._lookups = lookups
        self._lease_s = max(LEASE_S, settings.webhook.timeout_s + LEASE_MARGIN_S)
        self._reclaimed_s = -RECLAIM_EVERY_S

    async def deliver(self, prepared: Prepared) -> Outcome:
        """Post one message once and return what came of it."""
        delivery, post = prepared.delivery, Post(self._client)
        try:
            async with asyncio.timeout(self._settings.webhook.timeout_s):
                target = await self._lookups.resolve(delivery.account_id, delivery.url)
                headers = sign(delivery.message_id, delivery.timestamp_s, prepared.body, prepared.secrets)
                await post.send(target, prepared.body, headers)
        except UrlRefusedError as refused:
            return post.outcome(_refusal(refused.reason))
        except TimeoutError:
            return post.outcome("timeout")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            return post.outcome(transport_error(exc))
        return post.outcome()

    def turn(self, results: Sequence[Result], room: Room) -> tuple[list[Prepared], list[Result]]:
        """Record what is finished and take what is due, in one transaction.

        Returns:
            What to send, and what cannot be sent, to be recorded by the next turn.
        """
        try:
            with unit_of_work(self._engine) as conn:
                recorded = record(conn, results) if results else Recorded(frozenset(), {})
                self._reclaim_now_and_then(conn)
                taken = take_due(conn, room, lease_s=self._lease_s)
        except OperationalError:
            raise
        except DBAPIError as exc:
            # What cannot be written must not be tried for ever; the leases end and the messages go again.
            log.error("webhook_records_dropped", num_dropped=len(results), err=type(exc).__name__)
            return [], []
        _log_recorded(results, recorded)
        return self._prepare(taken)

    def _reclaim_now_and_then(self, conn: Connection) -> None:
        if monotonic_s() - self._reclaimed_s >= RECLAIM_EVERY_S:
            self._reclaimed_s = monotonic_s()
            num_reclaimed = reclaim(conn)
            if num_reclaimed:
                log.warning("webhook_leases_ended", num_reclaimed=num_reclaimed)

    def _prepare(self, taken: Iterable[Delivery]) -> tuple[list[Prepared], list[Result]]:
        prepared, unsendable = [], []
        for delivery in taken:
            try:
                secrets = [unseal(self._secret_key, sealed) for sealed in delivery.sealed_secrets]
                body = body_bytes(delivery, self._settings.base_url, self._store.presign)
                prepared.append(Prepared(delivery, body, secrets))
            except FarmError as exc:
                log.error("webhook_not_prepared", message=delivery.message_id, err=exc.code)
                unsendable.append((delivery, Outcome(0, error="not_prepared")))
        return prepared, unsendable


def run(settings: Settings, stop: threading.Event) -> None:
    """Send until `stop` is set; then finish what is on the wire and return."""
    asyncio.run(_run(settings, stop))


async def _run(settings: Settings, stop: threading.Event) -> None:
    policy = Policy.from_settings(
        allow_http=settings.webhook.allow_http, allow_cidrs=settings.webhook.allow_cidrs
    )
    engine = make_engine(settings, application="webhooks", pool_size=1)
    try:
        async with make_client(HEALTHY_PLACES + FAILING_PLACES) as client:
            sender = Sender(settings, engine, ObjectStore(settings), client, HostLookups(policy))
            await send_until(sender, stop)
    finally:
        engine.dispose()


async def send_until(sender: Sender, stop: threading.Event) -> None:
    """Keep as many deliveries on the wire as there are places, until `stop` is set."""
    wire = _Wire()
    with ThreadPoolExecutor(1, "webhook-database") as database:
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            results = wire.finished()
            try:
                prepared, unsendable = await loop.run_in_executor(database, sender.turn, results, wire.room())
            except OperationalError as exc:
                log.warning("webhook_database_unreachable", err=type(exc).__name__)
                wire.keep(results)
                await loop.run_in_executor(database, stop.wait, BROKEN_S)
                continue
            wire.keep(unsendable)
            for item in prepared:
                wire.put(item.delivery, asyncio.create_task(sender.deliver(item)))
            await wire.wait(0.0 if prepared or unsendable else IDLE_S)
        await wire.wait_all(GOODBYE_S)
        await loop.run_in_executor(database, sender.turn, wire.finished(), Room(0, 0, 0))


class _Wire:
    """The deliveries that are on the wire now, and what came of the others."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Outcome], Delivery] = {}
        self._finished: list[Result] = []

    def put(self, delivery: Delivery, task: asyncio.Task[Outcome]) -> None:
        self._running[task] = delivery

    def keep(self, results: Iterable[Result]) -> None:
        self._finished.extend(results)

    def finished(self) -> list[Result]:
        """Hand over what is to be recorded."""
        for task in [task for task in self._running if task.done()]:
            delivery = self._running.pop(task)
            exc = None if task.cancelled() else task.exception()
            if exc is not None:  # the lease ends by itself and the delivery goes out again
                log.error("webhook_attempt_broken", message=delivery.message_id, err=type(exc).__name__)
            elif not task.cancelled():
                self._finished.append((delivery, task.result()))
        results, self._finished = self._finished, []
        return results

    def room(self) -> Room:
        """Return the places that are free."""
        deliveries = self._running.values()
        num_failing = sum(delivery.is_failing for delivery in deliveries)
        return Room(
            healthy=max(0, HEALTHY_PLACES - (len(deliveries) - num_failing)),
            failing=max(0, FAILING_PLACES - num_failing),
            per_account=PLACES_PER_ACCOUNT,
            account_load=Counter(delivery.account_id for delivery in deliveries),
        )

    async def wait(self, timeout_s: float) -> None:
        """Wait until one is finished, at most for a while."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout_s)

    async def wait_all(self, timeout_s: float) -> None:
        """Give all a while to finish; those that do not are left to their leases."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def _refusal(reason: str) -> str:
    return {"dns": "dns_failed", "dns_timeout": "dns_timeout"}.get(reason, f"{REFUSED}{reason}")


def _count(outcome: Outcome) -> None:
    WEBHOOK_ATTEMPTS.inc()
    WEBHOOK_SECONDS.observe(outcome.duration_ms / 1000)
    if outcome.error is not None and outcome.error.startswith(REFUSED):
        WEBHOOK_BLOCKED.labels(outcome.error.removeprefix(REFUSED)).inc()


def _log_recorded(results: Sequence[Result], recorded: Recorded) -> None:
    for delivery, outcome in results:
        _count(outcome)
        attributes = {"message": delivery.message_id, "type": delivery.type, "attempt": delivery.attempt}
        trace_webhook(delivery.traceparent, outcome.duration_ms / 1000, attributes)
        log.info(
            "webhook_attempted",
            message=delivery.message_id,
            job_id=delivery.job_id,
            type=delivery.type,
            attempt=delivery.attempt,
            duration_ms=outcome.duration_ms,
            http_status=outcome.http_status,
            error=outcome.error,
            is_recorded=delivery.id in recorded.kept,
        )
    for endpoint_id, reason in recorded.disabled.items():
        log.warning("webhook_disabled", endpoint=endpoint_id, reason=reason)
