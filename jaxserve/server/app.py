"""The whole HTTP server as an ASGI app: the routes, and what every request passes."""

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.front import Front
from jaxserve.server.generation import ServerContext
from jaxserve.server.http import error_body, send_json
from jaxserve.server.routes import ROUTES
from jaxserve.server.routing import make_resources
from jaxserve.server.security import allow_origins, guard


def build_app(context: ServerContext) -> ASGIApp:
    """The whole HTTP server as an ASGI app."""
    # A bare router: what Starlette puts around one costs two calls for each chunk of a stream.
    router = Router(
        [Route(resource.path, resource) for resource in make_resources(ROUTES, context)],
        redirect_slashes=False,
        default=_not_found,
    )
    server = context.config.server
    guarded = guard(router, server.api_key, ROUTES) if server.api_key else router
    # Outside the guard: a browser asks for permission without a key.
    allowed = allow_origins(guarded, server) if server.allowed_origins else guarded
    return Front(allowed, context.metrics, ROUTES, server.root_path)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    body = error_body(404, f"There is no route {scope['path'][:200]}.")
    await send_json(send, body, status=404)
