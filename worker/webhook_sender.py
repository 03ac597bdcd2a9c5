"""The webhook sender: takes due deliveries, posts each once, records what came of it.

Promises: a message keeps its id over every retry, so a receiver can drop repeats; the address that was
checked is the address that is called; a slow receiver holds up nobody else, since every delivery is its own
coroutine with a total time limit; no redirect is followed and no proxy is read from the environment. A
sender that is killed between POST and record leaves a lease behind, and the delivery goes out again when
that ends. Runs as one thread of the ticker; any number of tickers may run.
"""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx
import structlog
from pydantic import SecretStr
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from farm.clock import now
from farm.db.session import make_engine, unit_of_work
from farm.jobs.queries import get_asset
from farm.secretbox import unseal
from farm.settings import Settings
from farm.storage import ObjectStore
from farm.webhooks.deliveries import EXCERPT_CHARS, Delivery, Outcome, record, take_due
from farm.webhooks.guard import Policy, Resolver, Target, UrlRefusedError, resolve_pinned, system_resolver
from farm.webhooks.signing import sign

log = structlog.get_logger(__name__)

IDLE_S = 0.5
BROKEN_S = 5.0
MAX_IN_FLIGHT = 64
CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024
DOWNLOAD_TTL_S = 3_600
USER_AGENT = "magi2-farm-webhooks/1"


@dataclass(frozen=True)
class Sender:
    """Everything one attempt needs; made once for the life of the thread."""

    settings: Settings
    secret_key: SecretStr
    engine: Engine
    store: ObjectStore
    client: httpx.AsyncClient
    policy: Policy
    resolver: Resolver = system_resolver

    async def deliver(self, delivery: Delivery) -> Outcome:
        """Post one message once and record what came of it."""
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self.settings.webhook.timeout_s):
                outcome = await self._post(delivery, started_s)
        except UrlRefusedError as refused:
            outcome = Outcome(_ms_since(started_s), error=f"refused_{refused.reason}")
        except TimeoutError:
            outcome = Outcome(_ms_since(started_s), error="timeout")
        except httpx.HTTPError as exc:
            outcome = Outcome(_ms_since(started_s), error=_transport_error(exc))
        is_recorded = await asyncio.to_thread(self._record, delivery, outcome)
        log.info(
            "webhook_attempted",
            message=delivery.message_id,
            job_id=delivery.job_id,
            type=delivery.type,
            attempt=delivery.attempt,
            http_status=outcome.http_status,
            error=outcome.error,
            is_recorded=is_recorded,
        )
        return outcome

    async def _post(self, delivery: Delivery, started_s: float) -> Outcome:
        # Name servers may hang and have no async interface in the standard library.
        target = await asyncio.to_thread(resolve_pinned, delivery.url, self.policy, self.resolver)
        body = await asyncio.to_thread(self._body, delivery)
        secrets = [unseal(self.secret_key, sealed) for sealed in delivery.sealed_secrets]
        headers = {
            **sign(delivery.message_id, delivery.timestamp_s, body, secrets),
            "host": target.host_header,
            "content-type": "application/json",
            "user-agent": USER_AGENT,
        }
        request = self.client.build_request("POST", pinned_url(target), content=body, headers=headers)
        if target.scheme == "https":
            # The name goes into SNI and the certificate check; the connection to the checked address.
            request.extensions["sni_hostname"] = target.host
        answer = await self.client.send(request, stream=True, follow_redirects=False)
        try:
            excerpt = await _read_excerpt(answer)
        finally:
            await answer.aclose()
        error = None if answer.is_success else f"http_{answer.status_code}"
        return Outcome(
            _ms_since(started_s),
            http_status=answer.status_code,
            error=error,
            excerpt=excerpt,
            resolved_ip=target.ip,
            retry_after_s=retry_after_s(answer.headers),
        )

    def _body(self, delivery: Delivery) -> bytes:
        """Return the exact bytes to sign and send; the links in them are made anew for every attempt."""
        body = delivery.body
        if delivery.job_id is not None and delivery.type != "video.deleted":
            urls = self._urls(delivery.account_id, delivery.job_id, delivery.type)
            body = {**body, "data": {**body["data"], "urls": urls}}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()

    def _urls(self, account_id: str, job_id: str, kind: str) -> dict[str, str]:
        urls = {"self": f"{self.settings.base_url}/v1/videos/{job_id}"}
        if kind != "video.completed":
            return urls
        with unit_of_work(self.engine) as conn:
            asset = get_asset(conn, account_id, job_id, "video")
        if asset is not None and asset.deleted_at is None:
            name = f"{job_id}.mp4"
            urls["content"] = f"{urls['self']}/content"
            urls["download"] = self.store.presign(asset.key, DOWNLOAD_TTL_S, name, asset.media_type)
        return urls

    def _record(self, delivery: Delivery, outcome: Outcome) -> bool:
        with unit_of_work(self.engine) as conn:
            return record(conn, delivery, outcome)

    def take(self, limit: int) -> list[Delivery]:
        """Lease due deliveries."""
        with unit_of_work(self.engine) as conn:
            return take_due(conn, limit=limit)


def run(settings: Settings, stop: threading.Event) -> None:
    """Send until `stop` is set; then finish what is on the wire and return."""
    settings.require("secret_key")
    if settings.secret_key is not None:
        asyncio.run(_run(settings, settings.secret_key, stop))


async def _run(settings: Settings, secret_key: SecretStr, stop: threading.Event) -> None:
    engine = make_engine(settings, application="webhooks")
    policy = Policy.from_settings(
        allow_http=settings.webhook.allow_http, allow_cidrs=settings.webhook.allow_cidrs
    )
    try:
        async with make_client() as client:
            sender = Sender(settings, secret_key, engine, ObjectStore(settings), client, policy)
            await send_until(sender, stop)
    finally:
        engine.dispose()


def make_client() -> httpx.AsyncClient:
    """Return a client that reads nothing from the environment and keeps no connection open."""
    limits = httpx.Limits(max_connections=MAX_IN_FLIGHT, max_keepalive_connections=0)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(trust_env=False, limits=limits, timeout=timeout)


async def send_until(sender: Sender, stop: threading.Event) -> None:
    """Keep up to MAX_IN_FLIGHT deliveries on the wire until `stop` is set."""
    running: set[asyncio.Task[Outcome]] = set()
    while not stop.is_set():
        taken = await asyncio.to_thread(_take_or_log, sender, MAX_IN_FLIGHT - len(running))
        running |= {asyncio.create_task(sender.deliver(delivery)) for delivery in taken}
        done = await _pause(running, 0.0 if taken else IDLE_S)
        _log_broken(done)
        running -= done
    if running:
        _log_broken(set((await asyncio.wait(running))[0]))


def _take_or_log(sender: Sender, limit: int) -> list[Delivery]:
    try:
        return sender.take(limit) if limit > 0 else []
    except OperationalError:
        log.warning("webhook_database_unreachable")
        time.sleep(BROKEN_S)
        return []


async def _pause(running: set[asyncio.Task[Outcome]], idle_s: float) -> set[asyncio.Task[Outcome]]:
    if not running:
        await asyncio.sleep(idle_s)
        return set()
    done, _ = await asyncio.wait(running, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
    return done


def _log_broken(done: set[asyncio.Task[Outcome]]) -> None:
    for task in done:
        exc = task.exception()
        if exc is not None:  # the lease ends by itself and the delivery goes out again
            log.error("webhook_attempt_broken", err=type(exc).__name__)


def pinned_url(target: Target) -> str:
    """Return the URL that connects to the checked address itself."""
    address = f"[{target.ip}]" if ":" in target.ip else target.ip
    return f"{target.scheme}://{address}:{target.port}{target.path}"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read Retry-After in either form; None when it is absent or makes no sense."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, (parsedate_to_datetime(text) - now()).total_seconds())
    except (TypeError, ValueError):
        return None


async def _read_excerpt(answer: httpx.Response) -> str:
    """Read at most MAX_ANSWER_BYTES as they come on the wire and keep the first characters."""
    head = bytearray()
    read_bytes = 0
    async for chunk in answer.aiter_raw():
        read_bytes += len(chunk)
        head += chunk[: EXCERPT_CHARS - len(head)]
        if read_bytes >= MAX_ANSWER_BYTES:
            break
    return bytes(head).decode("utf-8", errors="replace").replace("\x00", "")


def _transport_error(exc: httpx.HTTPError) -> str:
    """Return a stable word that names no address."""
    known = (
        (httpx.ConnectTimeout, "connect_timeout"),
        (httpx.ConnectError, "connect_failed"),
        (httpx.TimeoutException, "timeout"),
    )
    return next((word for kind, word in known if isinstance(exc, kind)), "connection_broken")


def _ms_since(started_s: float) -> int:
    return round((time.monotonic() - started_s) * 1000)
