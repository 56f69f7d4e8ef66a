"""Whether the server lives, takes requests, what it is, and its metrics."""

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from legato.errors import UnavailableError
from legato.server.service import Service


def status_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    async def health() -> dict[str, str]:
        """503 once the engine is dead: this process has to be replaced."""
        if service.engine.failure is not None:
            raise UnavailableError(service.engine.failure)
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """503 while new requests are refused, too."""
        service.readiness.check()
        return await health()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return dict(service.version)

    @router.get("/metrics")
    async def metrics() -> Response:
        text, content_type = await asyncio.to_thread(service.metrics_text)
        return Response(text, headers={"Content-Type": content_type})

    return router
