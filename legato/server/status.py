"""Whether the server lives, takes requests, what it is, and its metrics."""

from fastapi import APIRouter
from starlette.responses import Response

from legato.errors import UnavailableError
from legato.server.openapi import answers, has
from legato.server.service import Service


def status_routes(service: Service) -> APIRouter:
    router = APIRouter()
    alive = answers(503, json=has(status="string"))

    @router.head("/health", include_in_schema=False)
    @router.head("/ping", include_in_schema=False)
    @router.get("/health", responses=alive)
    @router.get("/ping", responses=alive)
    async def health() -> dict[str, str]:
        """503 while a step goes on for longer than it may, and once the engine is dead: this process has to
        be replaced. A server that loads or drains is alive."""
        if (trouble := service.engine.trouble) is not None:
            raise UnavailableError(trouble)
        return {"status": service.readiness.status}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=alive)
    async def ready() -> dict[str, str]:
        """503 while new requests are refused, too."""
        service.readiness.check()
        return await health()

    @router.get("/version", responses=answers(json=has(version="string")))
    async def version() -> dict[str, str]:
        return dict(service.version)

    @router.get("/metrics", responses=answers(text={"type": "string"}), response_class=Response)
    async def metrics() -> Response:
        text, content_type = await service.work.run_in_thread(1, service.metrics_text)
        return Response(text, headers={"Content-Type": content_type})

    return router
