"""The web application of one served model: all routes, all failures, nothing that runs by itself."""

from functools import cache

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from legato.server import failures
from legato.server.body_memory import BodyMemory
from legato.server.chat import chat_routes
from legato.server.completions import completion_routes
from legato.server.entrance import HEADER, Entrance
from legato.server.guards import BodyLimit, KeyGuard
from legato.server.models import model_routes
from legato.server.notices import HEADER as NOTICE
from legato.server.openapi import page
from legato.server.own_machine import OwnMachineGuard
from legato.server.service import Service
from legato.server.status import status_routes
from legato.server.tokens import token_routes


def create_app(service: Service) -> FastAPI:
    """The application takes requests once `service.readiness` says so and the engine is started."""
    # Pages that show /openapi.json load their scripts from elsewhere: there are none.
    app = FastAPI(openapi_url="/openapi.json", docs_url=None, redoc_url=None, redirect_slashes=False)
    described = cache(lambda: page(app, with_keys=bool(service.keys)))
    app.openapi = described  # type: ignore[method-assign]
    # The last one added is the first to see a request.
    app.add_middleware(BodyMemory, service.limits.all_body_bytes)
    app.add_middleware(BodyLimit, service.limits.body_bytes)
    if service.keys:
        app.add_middleware(KeyGuard, service.keys)
    if service.allowed_origins:
        # Before the keys: a browser's preflight brings none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(HEADER, NOTICE, "Retry-After"),
        )
    if service.own_machine_only:
        app.add_middleware(
            OwnMachineGuard, allowed_hosts=service.allowed_hosts, allowed_origins=service.allowed_origins
        )
    app.add_middleware(Entrance, service.http, service.access_log)
    makers = (completion_routes, chat_routes, model_routes, token_routes, status_routes)
    routers = [routes(service) for routes in makers]
    paths = [route.path for router in routers for route in router.routes if isinstance(route, Route)]
    failures.install(app, paths)
    for router in routers:
        app.include_router(router)
    return app
