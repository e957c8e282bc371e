"""The routes, and what every request passes: the API key and error bodies."""

import hmac

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve import __version__
from jaxserve.errors import RequestError
from jaxserve.metrics import CONTENT_TYPE
from jaxserve.server.chat import ChatCompletions
from jaxserve.server.completions import Completions
from jaxserve.server.generation import Endpoint, ServerContext
from jaxserve.server.http import encode_json, error_body, error_of, send_bytes, send_json
from jaxserve.server.protocol.common import ModelCard, ModelList

_OPEN_PATHS = frozenset(("/health", "/version", "/metrics"))


def build_app(context: ServerContext) -> ASGIApp:
    """The whole HTTP server as an ASGI app."""
    routes = _Routes(context)
    app = Starlette(
        routes=[
            Route(path, Endpoint(handler), methods=[method])
            for method, path, handler in (
                ("POST", "/v1/chat/completions", ChatCompletions(context)),
                ("POST", "/v1/completions", Completions(context)),
                ("GET", "/v1/models", routes.models),
                ("GET", "/v1/models/{model:path}", routes.model),
                ("GET", "/health", routes.health),
                ("GET", "/version", routes.version),
                ("GET", "/metrics", routes.metrics),
                ("POST", "/reset_prefix_cache", routes.reset_prefix_cache),
            )
        ],
        exception_handlers={HTTPException: _http_error, Exception: _our_error},
    )
    app.router.redirect_slashes = False
    api_key = context.config.server.api_key
    return _with_api_key(app, api_key) if api_key else app


class _Routes:
    """The routes that generate nothing."""

    def __init__(self, context: ServerContext):
        self._context = context
        config = context.config
        self._card = ModelCard(
            id=config.model.served_model_name,
            created=context.created_s,
            root=config.model.model,
            max_model_len=config.model.max_model_len,
        )

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models."""
        await send_json(send, ModelList(data=[self._card]))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models/{model}."""
        name = scope["path_params"]["model"]
        if name != self._card.id:
            raise RequestError(
                f"The model {name[:200]!r} does not exist.", param="model", status=404
            )
        await send_json(send, self._card)

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /health: 200 when the engine can run a step, else 503 and the reason."""
        error = self._context.llm.dead_error
        if error is not None:
            raise error
        await send_json(send, {"status": "ok"})

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /version."""
        await send_json(send, {"version": __version__})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics."""
        await send_bytes(send, self._context.metrics.render(), CONTENT_TYPE.encode())

    async def reset_prefix_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /reset_prefix_cache: 409 when blocks are in use."""
        if not await self._context.llm.reset_prefix_cache():
            raise RequestError("KV blocks are in use; nothing was reset.", status=409)
        await send_json(send, {"status": "ok"})


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
