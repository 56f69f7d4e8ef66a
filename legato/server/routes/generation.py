"""The route of an endpoint that generates replies. Completions and chat completions differ only in
`Endpoint`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from legato.server.generation.replies import Generation
from legato.server.generation.response import ResponseFormatter, ResponseKind, generation_response
from legato.server.routes.openapi import GENERATION_ERRORS, GENERATION_EVENTS, GENERATION_JSON, request_body
from legato.server.routes.openapi import responses as documented
from legato.server.schema.bodies import GenerationBody
from legato.server.schema.parsing import read_body
from legato.server.service import Service

B = TypeVar("B", bound=GenerationBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    """The parts of a route that differ between endpoints."""

    path: str
    body: type[B]
    kind: ResponseKind
    check: Callable[[Service, B], None]
    """Refuses a body before it is queued. Raises `RequestError`."""
    num_replies: Callable[[B], int]
    prepare: Callable[[Service, B, int, float], Awaitable[tuple[Generation, ResponseFormatter]]]
    """Makes the generation request from the service, the body, its size in bytes, and the time of arrival."""


def add_generation_route(router: APIRouter, service: Service, endpoint: Endpoint[B]) -> None:
    @router.post(
        endpoint.path,
        openapi_extra=request_body(endpoint.body),
        responses=documented(*GENERATION_ERRORS, json=GENERATION_JSON, events=GENERATION_EVENTS),
    )
    async def create(request: Request) -> Response:
        service.readiness.check()
        check = partial(endpoint.check, service)
        body = await read_body(request, endpoint.body, service.work, service.unknown_fields, check)
        arrival = service.engine.clock()
        size = len(await request.body())
        return await generation_response(
            service,
            request,
            body,
            endpoint.kind,
            partial(endpoint.prepare, service, body, size, arrival),
            num_replies=endpoint.num_replies(body),
        )
