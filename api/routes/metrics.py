"""`/metrics` for Prometheus: what this process counted and what the database knows.

Open to whoever has the token, or without one to this machine alone (`farm/metrics/exporter.py`). While the
database is away the process' own numbers are still served.
"""

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy.exc import SQLAlchemyError

from api.deps import ServicesDep
from farm.errors import AuthenticationError
from farm.metrics import gauges
from farm.metrics.exporter import CONTENT_TYPE, exposition, may_read

log = structlog.get_logger(__name__)

router = APIRouter(tags=["service"])


_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={401: {"description": "Neither the token nor this host.", "content": _PROBLEM}},
)
async def get_metrics(request: Request, services: ServicesDep) -> Response:
    """Return the metrics of this process and of the farm's database."""
    client = request.client.host if request.client else None
    forwarded = "x-forwarded-for" in request.headers or "forwarded" in request.headers
    authorization = request.headers.get("authorization")
    if not may_read(services.settings.metrics.token, authorization, client, is_forwarded=forwarded):
        raise AuthenticationError("metrics need the token of FARM_METRICS__TOKEN, or a scrape from this host")
    try:
        read = [await services.look(gauges.read, services.profiles.by_name)]
    except (SQLAlchemyError, OSError) as exc:
        log.warning("metrics_without_database", err=type(exc).__name__)
        read = []
    return Response(exposition(read), media_type=CONTENT_TYPE)
