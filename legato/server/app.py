"""The ASGI application of one served model: routes, middleware, error handlers."""

from functools import cache

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from legato.server.generation.notices import NOTICE_HEADER
from legato.server.routes.chat import chat_routes
from legato.server.routes.completions import completion_routes
from legato.server.routes.models import model_routes
from legato.server.routes.openapi import openapi_document
from legato.server.routes.status import status_routes
from legato.server.routes.tokens import token_routes
from legato.server.service import Service
from legato.server.transport.api_keys import ApiKeyMiddleware
from legato.server.transport.body_limits import BodyLimitMiddleware, BodyMemoryMiddleware
from legato.server.transport.errors import install_error_handlers
from legato.server.transport.loopback_guard import LoopbackGuardMiddleware
from legato.server.transport.request_context import REQUEST_ID_HEADER, RequestContextMiddleware


def create_app(service: Service) -> FastAPI:
    """The application. It accepts requests when `service.readiness` is ready and the engine has started."""
    # Pages that display /openapi.json would load scripts from other sites, so there are none.
    app = FastAPI(openapi_url="/openapi.json", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi = cache(  # type: ignore[method-assign]
        lambda: openapi_document(app, with_keys=bool(service.access.keys))
    )
    _add_middleware(app, service)
    makers = (completion_routes, chat_routes, model_routes, token_routes, status_routes)
    routers = [make(service) for make in makers]
    paths = [route.path for router in routers for route in router.routes if isinstance(route, Route)]
    install_error_handlers(app, paths)
    for router in routers:
        app.include_router(router)
    return app


def _add_middleware(app: FastAPI, service: Service) -> None:
    """The middleware that is added last sees a request first."""
    limits, access = service.limits, service.access
    app.add_middleware(BodyMemoryMiddleware, limits.all_body_bytes)
    app.add_middleware(BodyLimitMiddleware, limits.body_bytes)
    if access.keys:
        app.add_middleware(ApiKeyMiddleware, access.keys)
    if access.allowed_origins:
        # Before the keys: a browser's preflight request has none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, NOTICE_HEADER, "Retry-After"),
        )
    if access.loopback_only:
        app.add_middleware(
            LoopbackGuardMiddleware,
            allowed_hosts=access.allowed_hosts,
            allowed_origins=access.allowed_origins,
        )
    app.add_middleware(RequestContextMiddleware, service.http, service.access_log)
