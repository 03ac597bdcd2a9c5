"""Tells whether this process can serve: database, schema, object store, and what works with less.

Results are kept for ten seconds and one check runs at a time, so a storm of probes costs nothing. Redis is
never a reason to be unready: jobs are accepted without it.
"""

import asyncio
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from api.deps import Services
from api.schemas import Readiness
from farm.clock import monotonic_s
from farm.db.schema import current_revision, newest_revision
from farm.storage import CLOCK_REFUSE_S, CLOCK_WARN_S, StorageError

log = structlog.get_logger(__name__)

CACHE_S = 10.0
OK = "ok"


@dataclass
class Findings:
    """What one round of checks found."""

    checks: dict[str, str] = field(default_factory=dict)
    degraded: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Tell whether every required part answered."""
        return all(value == OK for value in self.checks.values())


class ReadinessProbe:
    """The cached answer to `/readyz`."""

    def __init__(self, services: Services) -> None:
        """Know the parts; nothing is checked yet."""
        self._services = services
        self._newest_revision = newest_revision()
        self._findings = Findings()
        self._fresh_until_s = 0.0
        self._lock = asyncio.Lock()

    async def answer(self) -> Readiness:
        """Return the findings of the last ten seconds, and whether the process is being stopped."""
        async with self._lock:
            if monotonic_s() >= self._fresh_until_s:
                self._findings = await self._check()
                self._fresh_until_s = monotonic_s() + CACHE_S
        checks = dict(self._findings.checks)
        if self._services.is_stopping():
            checks["process"] = "draining"
        is_ready = all(value == OK for value in checks.values())
        return Readiness(
            status="ready" if is_ready else "not_ready", checks=checks, degraded=self._findings.degraded
        )

    async def _check(self) -> Findings:
        findings = Findings()
        await asyncio.gather(
            self._check_database(findings), self._check_store(findings), self._check_broker(findings)
        )
        if not findings.is_ready or findings.degraded:
            log.warning("readiness", checks=findings.checks, degraded=findings.degraded)
        return findings

    async def _check_database(self, findings: Findings) -> None:
        try:
            revision = await self._services.read(current_revision)
        except (SQLAlchemyError, OSError):
            findings.checks["database"] = "unreachable"
            return
        findings.checks["database"] = OK
        if revision == self._newest_revision:
            findings.checks["schema"] = OK
        elif revision is not None and revision > self._newest_revision:
            # Revisions are numbered. A newer schema was expanded first, as every rolling update does: serve
            # on.
            findings.checks["schema"] = OK
            findings.degraded.append("schema_is_newer")
        else:
            findings.checks["schema"] = "run the migrations"

    async def _check_store(self, findings: Findings) -> None:
        try:
            offset_s = abs(await asyncio.to_thread(self._services.store.clock_offset_s))
        except StorageError:
            findings.checks["object_store"] = "unreachable"
            return
        findings.checks["object_store"] = OK
        if offset_s > CLOCK_REFUSE_S:
            findings.checks["clock"] = f"differs from the store's by {offset_s:.0f} s"
        elif offset_s > CLOCK_WARN_S:
            findings.degraded.append("clock")

    async def _check_broker(self, findings: Findings) -> None:
        try:
            await self._services.broker.ping()
        except (RedisError, OSError):
            findings.degraded.append("redis")
