"""What a page is: who may see it, what it reads, its template, and which of its regions stay fresh.

A region is a template of its own under `regions/`, shown in the page and, over the event stream, again
whenever it reads differently. Reading happens in one function per page, which gets an `Ask`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.dashboard import render
from api.dashboard.access import ROOT, Visitor, renewed, services_of, visitor_of
from api.deps import Services
from farm.admins import Role

LIVE = "/live"


@dataclass(frozen=True)
class Ask:
    """A look at a page: by whom, with which words in its path and query."""

    request: Request
    services: Services
    visitor: Visitor

    def word(self, name: str) -> str:
        """Return a member of the query, empty if it is not there."""
        return self.request.query_params.get(name, "").strip().replace("\0", "")

    def part(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])


Context = dict[str, Any]
Load = Callable[[Ask], Awaitable[Context]]


@dataclass(frozen=True)
class Page:
    """One page of the dashboard."""

    path: str
    name: str  # of its template
    section: str
    load: Load
    regions: tuple[str, ...] = ()
    role: Role = Role.VIEWER
    every_s: float = 2.0

    def route(self) -> Route:
        """Return the route that shows it."""

        async def show(request: Request) -> Response:
            visitor = await visitor_of(request, self.role)
            context = await self.load(Ask(request, services_of(request), visitor))
            return render.page(
                request,
                f"{self.name}.html",
                await renewed(request, visitor),
                section=self.section,
                live_url=self._live_url(request),
                **context,
            )

        return Route(self.path, show, methods=["GET"], name=self.name)

    def drawn(self, context: Mapping[str, Any], visitor: Visitor, here: str) -> dict[str, str]:
        """Return the regions as HTML, by the ids of their elements."""
        shared = {**context, "visitor": visitor, "section": self.section, "here": here}
        return {name: render.fragment(f"regions/{name}.html", shared) for name in self.regions}

    def _live_url(self, request: Request) -> str | None:
        if not self.regions:
            return None
        path = request.url.path.removeprefix(ROOT)
        query = f"?{request.url.query}" if request.url.query else ""
        return f"{ROOT}{LIVE}{path}{query}"
