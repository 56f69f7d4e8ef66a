"""Liveness, readiness, version and metrics."""

from fastapi import APIRouter
from starlette.responses import Response

from legato.errors import UnavailableError
from legato.server.routes.openapi import object_schema, responses
from legato.server.service import Service


def status_routes(service: Service) -> APIRouter:
    router = APIRouter()
    alive = responses(503, json=object_schema(status="string"))

    @router.head("/health", include_in_schema=False)
    @router.head("/ping", include_in_schema=False)
    @router.get("/health", responses=alive)
    @router.get("/ping", responses=alive)
    async def health() -> dict[str, str]:
        """503 while a step takes longer than --step-timeout, and after the engine has died: the process must
        be replaced. A server that is loading or draining is alive."""
        if (reason := service.engine.stall_reason) is not None:
            raise UnavailableError(reason)
        return {"status": service.readiness.status}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=alive)
    async def ready() -> dict[str, str]:
        """503 also while new requests are refused."""
        service.readiness.check()
        return await health()

    @router.get("/version", responses=responses(json=object_schema(version="string")))
    async def version() -> dict[str, str]:
        return dict(service.version)

    @router.get("/metrics", responses=responses(text={"type": "string"}), response_class=Response)
    async def metrics() -> Response:
        text, content_type = await service.work.run_in_thread(1, service.metrics_text)
        return Response(text, headers={"Content-Type": content_type})

    return router
