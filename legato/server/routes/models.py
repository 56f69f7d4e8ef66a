"""GET /v1/models: the served model, and the check of the model name in requests."""

import time

from fastapi import APIRouter

from legato.errors import NotFoundError
from legato.server.routes.openapi import object_schema, responses
from legato.server.service import ServedModel, Service


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises `NotFoundError` for the name of another model. No name means the served model."""
    if name not in (None, model.name):
        raise NotFoundError(
            f"there is no model of this name here, only {model.name}",
            param="model",
            code="model_not_found",
        )


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()
    model = service.model
    card: dict[str, object] = {
        "id": model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "legato",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "sampling_defaults": model.sampling_defaults.changed,
    }

    @router.get("/v1/models", responses=responses(json=object_schema(object="string", data="array")))
    async def list_models() -> dict[str, object]:
        return {"object": "list", "data": [card]}

    @router.get(
        "/v1/models/{name:path}",
        responses=responses(404, json=object_schema(id="string", max_model_len="integer")),
    )
    async def retrieve_model(name: str) -> dict[str, object]:
        if not name:
            raise NotFoundError("no such path; there is /v1/models", code="not_found")
        check_model(name, model)
        return card

    return router
