"""Builds the HTTP application. Importing it starts nothing and never reaches torch.

Layers from the outside: CORS (only where origins are allowed), HEAD, request id and errors, routes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api.auth import KeyCache
from api.body import BodyRules
from api.dashboard.app import add_dashboard, make_dashboard
from api.deps import make_services
from api.description import add_docs_page, describe
from api.head import HeadMiddleware
from api.problems import REQUEST_ID_HEADER, install
from api.rates import policy
from api.readiness import ReadinessProbe
from api.routes import (
    actions,
    assets,
    batches,
    content,
    events,
    health,
    keys,
    metrics,
    models,
    service,
    sync,
    videos,
    webhooks,
)
from api.streams import Hub
from farm.settings import Settings
from farm.webhooks.guard import Resolver

DESCRIPTION = (
    "Text and image to 10-second video with sound, as jobs. Errors: RFC 9457 with OpenAI's error object."
)
EXPOSED_HEADERS = (
    REQUEST_ID_HEADER,
    "ETag",
    "Location",
    "Retry-After",
    "RateLimit",
    "RateLimit-Policy",
    "Idempotent-Replayed",
    "openai-poll-after-ms",
    "Content-Range",
)


def create_app(
    settings: Settings, *, body_rules: BodyRules | None = None, resolver: Resolver | None = None
) -> FastAPI:
    """Build the application; it contacts nothing before the first request.

    Args:
        settings: Must hold SECRET_KEY and KEY_PEPPER.
        body_rules: Limits of request bodies, if others than the product's.
        resolver: Looks hosts of webhooks up; the system's by default.
    """
    services = make_services(settings, body_rules=body_rules, resolver=resolver)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await services.close()

    app = FastAPI(
        title="MAGI-2 farm",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # the framework's pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.services = services
    app.state.key_cache = KeyCache()
    app.state.hub = Hub(services)
    app.state.readiness = ReadinessProbe(services)
    # In the order in which paths are tried: `batches` and `sync` before what takes any id.
    of_videos = (sync, batches, videos, actions, content, events)
    of_service = (models, service, health, metrics)
    routers = [module.router for module in (*of_videos, webhooks, keys, assets, *of_service)]
    for router in routers:
        app.include_router(router)
    app.openapi = describe(app)  # type: ignore[method-assign] # the framework's own way to do it
    if settings.api_docs:
        add_docs_page(app)
    if settings.admin.enabled:
        add_dashboard(app, make_dashboard(services, app.state.readiness, app.state.key_cache))
    install(app, routers, policy(settings.rate))
    app.add_middleware(HeadMiddleware)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "PATCH", "DELETE"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "X-Api-Key",
                "Idempotency-Key",
                REQUEST_ID_HEADER,
            ],
            expose_headers=list(EXPOSED_HEADERS),
        )
    return app
