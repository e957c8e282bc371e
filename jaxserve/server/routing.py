"""What a route is: one entry of the table in `routes.py`, from which app and OpenAPI are made."""

import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.engine.async_llm import QueueFullError
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.server.generation import ServerContext
from jaxserve.server.http import ClientDisconnected, error_of, send_json
from jaxserve.server.protocol.common import ErrorBody

_PATH_PARAM = re.compile(r"\{(\w+)(?::\w+)?\}")

type Handler[T] = Callable[[T, Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One method of one path.

    path: Starlette's spelling, such as "/v1/models/{model:path}".
    surface: makes the object that `handler` is a method of; routes with the same surface share one.
    summary: a short sentence, for the API's documents.
    request: the body's type; None: no body is read.
    response: the type of a whole answer; None: text of `content_type`.
    streams: the answer can be server-sent events; `event`: the type of their JSON, if it is one.
    errors: statuses beside those that `all_errors` derives.
    error, error_of: the type of an error's body, and what makes one.
    is_open: answers without the API key.
    generates: asks the engine for tokens, so admission limits hold and `/load` counts it.
    """

    method: str
    path: str
    surface: Callable[[ServerContext], Any]
    handler: Handler[Any]
    summary: str
    request: Any = None
    response: Any = None
    content_type: str = "application/json"
    streams: bool = False
    event: Any = None
    errors: tuple[int, ...] = ()
    error: Any = ErrorBody
    error_of: Callable[[Exception], tuple[int, msgspec.Struct]] = error_of
    is_open: bool = False
    generates: bool = False

    @property
    def path_params(self) -> list[str]:
        """Names of the path's variables."""
        return _PATH_PARAM.findall(self.path)

    @property
    def plain_path(self) -> str:
        """The path as OpenAPI spells it: variables without a kind."""
        return _PATH_PARAM.sub(r"{\1}", self.path)

    @property
    def all_errors(self) -> list[int]:
        """Every status from 400 that the route answers on purpose, ascending."""
        statuses = {400, *self.errors}
        if self.request is not None:
            statuses |= {408, 413}
        if self.generates:
            statuses |= {404, 503}
        if not self.is_open:
            statuses.add(401)
        return sorted(statuses)


class Endpoint:
    """A route as an ASGI app; answers the errors of a handler that has not begun its response."""

    def __init__(self, route: Route, handler: ASGIApp, context: ServerContext):
        self.route = route
        self._handler = handler
        self._llm = context.llm
        self._metrics = context.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.num_generating += self.route.generates
        try:
            if self.route.generates:
                self._llm.check_admission()  # before the work of reading a body
            await self._handler(scope, receive, send)
        except (RequestError, EngineDeadError) as error:
            await self._answer(error, send)
        except ClientDisconnected:
            pass  # nobody to answer
        finally:
            self._metrics.num_generating -= self.route.generates

    async def _answer(self, error: RequestError | EngineDeadError, send: Send) -> None:
        headers = []
        if isinstance(error, RequestError) and error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        self._metrics.num_refused += isinstance(error, QueueFullError)
        status, body = self.route.error_of(error)
        await send_json(send, body, status=status, headers=headers)


class Resource:
    """All methods of one path as an ASGI app."""

    def __init__(self, path: str):
        self.path = path
        self._endpoints: dict[str, Endpoint] = {}

    def add(self, endpoint: Endpoint) -> None:
        """HEAD comes with GET; the connection leaves out the body."""
        method = endpoint.route.method
        assert method not in self._endpoints, (method, self.path)
        self._endpoints[method] = endpoint
        if method == "GET":
            self._endpoints["HEAD"] = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["method"])
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        error = RequestError(f"{scope['path']} does not take {scope['method']}.", status=405)
        other = next(iter(self._endpoints.values()))  # the errors of a path have one form
        _, body = other.route.error_of(error)
        allow = ", ".join(self._endpoints).encode()
        await send_json(send, body, status=405, headers=[(b"allow", allow)])


def make_resources(routes: Sequence[Route], context: ServerContext) -> list[Resource]:
    """A resource a path, in the order of the table, over one object a surface."""
    surfaces: dict[Callable[[ServerContext], Any], Any] = {}
    resources: dict[str, Resource] = {}
    for route in routes:
        if route.surface not in surfaces:
            surfaces[route.surface] = route.surface(context)
        handler = functools.partial(route.handler, surfaces[route.surface])
        resource = resources.setdefault(route.path, Resource(route.path))
        resource.add(Endpoint(route, handler, context))
    return list(resources.values())
