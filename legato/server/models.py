"""GET /v1/models: the one model that is served, and the check of the name that requests carry."""

import time

from fastapi import APIRouter

from legato.errors import NotFoundError
from legato.server.openapi import answers, has
from legato.server.service import Service


def check_model(name: str | None, service: Service) -> None:
    """Raises `NotFoundError` for another model's name. No name means the served model."""
    if name not in (None, service.model_name):
        raise NotFoundError(
            f"there is no model of this name here, only {service.model_name}",
            param="model",
            code="model_not_found",
        )


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()
    card: dict[str, object] = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "legato",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.max_model_len,
        "sampling_defaults": service.sampling_defaults.changed,
    }

    @router.get("/v1/models", responses=answers(json=has(object="string", data="array")))
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card]}

    @router.get(
        "/v1/models/{name:path}", responses=answers(404, json=has(id="string", max_model_len="integer"))
    )
    async def model(name: str) -> dict[str, object]:
        if not name:
            raise NotFoundError("no such path; there is /v1/models", code="not_found")
        check_model(name, service)
        return card

    return router
