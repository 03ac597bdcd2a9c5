"""Turns what was read into HTML: one Jinja environment that escapes everything, and the words of its filters.

Whatever a user wrote (prompts, names, tags, answers of receivers) reaches a page as text only. The headers
here forbid inline scripts and styles, frames and foreign sources, so that markup which slipped through would
still do nothing.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from api.dashboard import charts
from api.dashboard.access import ROOT, SAID_COOKIE, Visitor, set_session
from farm.clock import now

HERE = Path(__file__).parent
STATIC = HERE / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    # Not `no-referrer`: with it, browsers send the Origin `null` with our own forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# What the navigation shows: group, then (path, name, section).
NAVIGATION = (
    ("Now", (("/", "Overview", "overview"), ("/queue", "Queue", "queue"), ("/jobs", "Jobs", "jobs"))),
    (
        "Machines",
        (
            ("/groups", "Groups", "groups"),
            ("/waves", "Waves", "waves"),
            ("/quarantine", "Quarantine", "quarantine"),
        ),
    ),
    (
        "Service",
        (
            ("/webhooks", "Webhooks", "webhooks"),
            ("/accounts", "Accounts", "accounts"),
            ("/storage", "Storage", "storage"),
        ),
    ),
    ("Records", (("/audit", "Audit", "audit"), ("/system", "System", "system"))),
)
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def duration(seconds: float | None) -> str:
    """Say how long something takes, with two units at most."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole} s" if seconds >= 10 or float(seconds).is_integer() else f"{max(0.0, seconds):.1f} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s" if whole % _MINUTE else f"{whole // _MINUTE} min"
    if whole < _DAY:
        minutes = whole % _HOUR // _MINUTE
        return f"{whole // _HOUR} h {minutes} min" if minutes else f"{whole // _HOUR} h"
    hours = whole % _DAY // _HOUR
    return f"{whole // _DAY} d {hours} h" if hours else f"{whole // _DAY} d"


def about(seconds: float) -> str:
    """Say how long something probably takes, with one unit."""
    for unit_s, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 1.5 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


def ago(at: datetime | None) -> str:
    """Say how long something is past, or in how long it will be."""
    if at is None:
        return "never"
    seconds = (now() - at).total_seconds()
    if abs(seconds) < 2:
        return "now"
    return f"{duration(int(seconds))} ago" if seconds > 0 else f"in {duration(int(-seconds))}"


def due(at: datetime) -> str:
    """Say when something that waits for its time will be."""
    return ago(at) if at > now() else "due now"


def instant(at: datetime | None) -> str:
    """Write an instant out, to the second, in UTC."""
    return "-" if at is None else at.strftime("%Y-%m-%d %H:%M:%S UTC")


def size(num_bytes: float | None) -> str:
    """Say how many bytes something has."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def percent(share: float | None) -> str:
    """Write a share as per cent."""
    if share is None:
        return "-"
    return f"{share * 100:.0f} %" if share in {0, 1} or share >= 0.1 else f"{share * 100:.1f} %"


def number(value: float | None) -> str:
    """Write a number with its thousands apart."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def pretty(value: Any) -> str:
    """Write data as indented JSON."""
    return json.dumps(value, indent=2, default=str, ensure_ascii=False, sort_keys=False)


def brief(text: str, limit: int = 120) -> str:
    """Cut a long text for a list, and show that it was cut."""
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= limit else f"{one_line[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"


def with_query(path: str, **members: Any) -> str:
    """Return a path with those members that say something."""
    given = {name: value for name, value in members.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (duration, about, ago, due, instant, size, percent, number, pretty, brief)
    made.filters.update({function.__name__: function for function in filters})
    made.globals.update(
        root=ROOT,
        navigation=NAVIGATION,
        with_query=with_query,
        sparkline=charts.sparkline,
        bar=charts.bar,
        timeline_bar=charts.timeline_bar,
        style_version=_version("style.css"),
        script_version=_version("dashboard.js"),
    )
    return made


def _version(name: str) -> str:
    """Return what changes with a file, so that browsers may keep it for long."""
    return str(int((STATIC / name).stat().st_mtime))


_ENVIRONMENT = _environment()


def fragment(template: str, context: Mapping[str, Any]) -> str:
    """Render a part of a page."""
    return _ENVIRONMENT.get_template(template).render(**context)


def page(
    request: Request, template: str, visitor: Visitor | None, status: int = 200, **context: Any
) -> HTMLResponse:
    """Render a whole page, with what the change before it had to say."""
    said = unquote(request.cookies.get(SAID_COOKIE, ""))
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    shared = {"visitor": visitor, "said": said[1:], "said_kind": said[:1], "here": path}
    body = fragment(template, {"live_url": None, **context, **shared})
    response = HTMLResponse(body, status_code=status)
    if said:
        response.delete_cookie(SAID_COOKIE, path=ROOT)
    if visitor is not None and visitor.cookie:
        set_session(response, request, visitor.cookie)
    return response


def say(text: str, *, is_error: bool = False) -> str:
    """Return the value of the cookie that carries a sentence to the next page."""
    return quote(("!" if is_error else "+") + text[:1000])
