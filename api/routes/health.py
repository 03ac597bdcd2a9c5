"""Liveness and readiness; open to everybody, and they say nothing about where the parts are."""

from fastapi import APIRouter, Request, Response

from api.readiness import ReadinessProbe
from api.schemas import Alive, Readiness

router = APIRouter(tags=["service"])


@router.get("/livez")
@router.get("/health", include_in_schema=False)
async def get_liveness() -> Alive:
    """Answer as long as the event loop turns."""
    return Alive()


@router.get("/readyz", responses={503: {"model": Readiness}})
async def get_readiness(request: Request, response: Response) -> Readiness:
    """Tell whether this process can serve requests; 503 while a required part is away."""
    probe: ReadinessProbe = request.app.state.readiness
    answer = await probe.answer()
    if answer.status != "ready":
        response.status_code = 503
        response.headers["Retry-After"] = "10"
    return answer
