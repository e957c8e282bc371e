"""The whole HTTP server as an ASGI app: the routes, and what every request passes."""

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from jaxserve.server.front import Front
from jaxserve.server.generation import ServerContext
from jaxserve.server.http import encode_json, error_body, error_of
from jaxserve.server.routes import ROUTES
from jaxserve.server.routing import make_endpoints
from jaxserve.server.security import allow_origins, guard


def build_app(context: ServerContext) -> ASGIApp:
    """The whole HTTP server as an ASGI app."""
    app = Starlette(
        routes=[
            StarletteRoute(endpoint.route.path, endpoint, methods=[endpoint.route.method])
            for endpoint in make_endpoints(ROUTES, context)
        ],
        exception_handlers={HTTPException: _http_error, Exception: _our_error},
    )
    app.router.redirect_slashes = False
    server = context.config.server
    guarded = guard(app, server.api_key, ROUTES) if server.api_key else app
    # Outside the guard: a browser asks for permission without a key.
    allowed = allow_origins(guarded, server) if server.allowed_origins else guarded
    return Front(allowed, context.metrics, ROUTES, server.root_path)


def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown route or a wrong method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"There is no route {request.url.path}.",
        405: f"{request.url.path} does not take {request.method}.",
    }.get(error.status_code, error.detail)
    return _response(error.status_code, error_body(error.status_code, message), error.headers)


def _our_error(request: Request, error: Exception) -> Response:
    """A bug; Starlette raises it again, and uvicorn logs it."""
    return _response(*error_of(error))


def _response(status: int, body: msgspec.Struct, headers=None) -> Response:
    return Response(encode_json(body), status, headers, media_type="application/json")
