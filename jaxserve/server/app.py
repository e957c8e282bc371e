"""The whole HTTP server as an ASGI app: the routes, and what every request passes."""

import hmac

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.generation import ServerContext
from jaxserve.server.http import encode_json, error_body, error_of, send_json
from jaxserve.server.routes import ROUTES
from jaxserve.server.routing import make_endpoints

_OPEN_PATHS = frozenset(route.path for route in ROUTES if route.is_open)


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
    api_key = context.config.server.api_key
    return _with_api_key(app, api_key) if api_key else app


def _with_api_key(app: ASGIApp, api_key: str) -> ASGIApp:
    """Asks for the key everywhere but on the paths that probes and scrapers use."""
    wanted = api_key.encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), wanted):
                body = error_body(401, "The API key is missing or wrong.", code="invalid_api_key")
                await send_json(send, body, status=401, headers=[(b"www-authenticate", b"Bearer")])
                return
        await app(scope, receive, send)

    return guarded


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
