"""Pages of storage, the audit log and the system itself."""

import ast
import asyncio
import importlib.metadata
import platform
from dataclasses import replace

from sqlalchemy import Connection, text
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from api.dashboard.access import desk_of, key_of, services_of, visitor_of
from api.dashboard.pages import Ask, Context, Page
from farm.admins import Role, list_admins
from farm.audit import AuditQuery, list_entries
from farm.clock import now
from farm.db.schema import current_revision, newest_revision
from farm.settings import SettingLine, Settings, describe
from farm.storage import StorageError
from farm.watch.overview import overview
from farm.watch.service import storage

PER_PAGE = 50
DISTRIBUTION = "magi2-farm"


async def load_storage(ask: Ask) -> Context:
    """Read what is stored, what goes soon and what the sweeps have to remove."""
    found = await ask.services.look(storage)
    return {"storage": found, "largest": max((row.bytes for row in found.accounts), default=0)}


async def load_audit(ask: Ask) -> Context:
    """Read a page of the log."""
    before = ask.word("before")
    query = AuditQuery(
        actor=ask.word("actor") or None,
        action=ask.word("action") or None,
        target=ask.word("target") or None,
        before_id=int(before) if before.isdecimal() and len(before) < 18 else None,
        limit=PER_PAGE,
    )
    found = await ask.services.look(list_entries, query)
    filters = {name: ask.word(name) for name in ("actor", "action", "target")}
    return {"log": found, "filters": filters}


async def load_system(ask: Ask) -> Context:
    """Read what runs here, how its parts are, and its settings with secrets masked."""
    services = ask.services
    readiness = await desk_of(ask.request).readiness.answer()
    revision, server = await services.look(_database)
    return {
        "version": importlib.metadata.version(DISTRIBUTION),
        "python": platform.python_version(),
        "started_at": services.started_at,
        "at": now(),
        "revision": revision,
        "newest": newest_revision(),
        "server": server,
        "readiness": readiness,
        "clock_offset_s": await _clock_offset(ask),
        "settings": _settings(services.settings) if ask.visitor.may(Role.OPERATOR) else [],
        "admins": await services.look(list_admins) if ask.visitor.may(Role.ADMIN) else [],
    }


def _settings(settings: Settings) -> list[SettingLine]:
    return [replace(line, value=plain(line.value)) for line in describe(settings)]


def plain(value: str) -> str:
    """Write a setting as one who does not know Python would: as the environment spells it, if it does."""
    if value[:1] in {"[", "("}:
        try:
            return ", ".join(map(str, ast.literal_eval(value))) or "none"
        except (SyntaxError, ValueError):
            return value
    return {"None": "not set", "True": "true", "False": "false", "": "empty"}.get(value, value)


def _database(conn: Connection) -> tuple[str | None, str]:
    return current_revision(conn), str(conn.execute(text("SHOW server_version")).scalar_one())


async def _clock_offset(ask: Ask) -> float | None:
    try:
        return await asyncio.wait_for(ask.services.in_store(ask.services.store.clock_offset_s), 5)
    except (StorageError, TimeoutError):
        return None


async def overview_json(request: Request) -> Response:
    """Answer the numbers of the first page as JSON, to a session or a key with `admin:read`."""
    bearer = request.headers.get("authorization", "").partition(" ")
    if bearer[0].lower() == "bearer":
        await key_of(request, Role.VIEWER, bearer[2].strip())
    else:
        await visitor_of(request, Role.VIEWER)
    farm = await services_of(request).look(overview)
    return JSONResponse(
        {
            "profiles": [
                {
                    "name": profile.name,
                    "queued": profile.queued,
                    "active": profile.active,
                    "oldest_s": profile.oldest_s,
                    "groups_up": profile.groups_up,
                    "groups_busy": profile.groups_busy,
                    "finished_last_hour": profile.finished_last_hour,
                }
                for profile in farm.profiles
            ],
            "failure_rate_1h": farm.failure_rate_1h,
            "failure_rate_24h": farm.failure_rate_24h,
            "dead_webhooks": farm.dead_webhooks,
            "outbox_unsent": farm.outbox_unsent,
            "outbox_oldest_s": farm.outbox_oldest_s,
        }
    )


PAGES = (
    Page("/storage", "storage", "storage", load_storage),
    Page("/audit", "audit", "audit", load_audit, role=Role.OPERATOR),
    Page("/system", "system", "system", load_system),
)
FILES = (Route("/api/overview", overview_json, methods=["GET"]),)
