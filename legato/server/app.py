"""The web application of one served model: all routes, all failures, nothing that runs by itself."""

from fastapi import FastAPI

from legato.server import failures
from legato.server.chat import chat_routes
from legato.server.completions import completion_routes
from legato.server.entrance import Entrance
from legato.server.models import model_routes
from legato.server.service import Service
from legato.server.status import status_routes
from legato.server.tokens import token_routes


def create_app(service: Service) -> FastAPI:
    """The application takes requests once `service.readiness` says so and the engine is started."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(Entrance)
    failures.install(app)
    for routes in (completion_routes, chat_routes, model_routes, token_routes, status_routes):
        app.include_router(routes(service))
    return app
