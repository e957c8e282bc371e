"""What every request passes first and every response last: its id, its path, its count."""

import re
import uuid
from collections.abc import Awaitable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import RequestError
from jaxserve.metrics import ServerMetrics
from jaxserve.server.http import error_of, send_json
from jaxserve.server.routing import Resource, Route

OTHER_ROUTE = "other"
NO_RESPONSE = 499  # the client was gone before an answer began
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Front:
    """Gives every response the `X-Request-Id` of its request, or one of its own, and counts it by
    route and status. What fails by a bug is answered, and raised on.

    root_path: taken from the beginning of a path that has it; a proxy may leave it or not.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, routes: Sequence[Route], root_path: str = ""
    ):
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(route.path for route in routes)
        self._root = root_path + "/" if root_path else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        if self._root is not None and scope["path"].startswith(self._root):
            scope["path"] = scope["path"][len(self._root) - 1 :]
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        is_valid = len(given) <= 1 and all(_REQUEST_ID.fullmatch(value) for value in given)
        status = NO_RESPONSE

        # Not a coroutine: chunks of a stream go through without another frame.
        def send_on(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _with_request_id(
                    message.get("headers", ()), given[0] if given and is_valid else None
                )
            return send(message)

        try:
            if is_valid:
                await self._app(scope, receive, send_on)
            else:
                error = RequestError(
                    "X-Request-Id must be one header of 1 to 128 visible ASCII characters."
                )
                await send_json(send_on, error_of(error)[1], status=400)
        except Exception as error:  # a bug; the connection logs it
            if status == NO_RESPONSE:
                await send_json(send_on, error_of(error)[1], status=500)
            raise
        finally:
            self._metrics.count_http(self._route_of(scope), status)

    def _route_of(self, scope: Scope) -> str:
        endpoint = scope.get("endpoint")
        if isinstance(endpoint, Resource):
            return endpoint.path
        return scope["path"] if scope["path"] in self._paths else OTHER_ROUTE


def _with_request_id(
    headers: Sequence[tuple[bytes, bytes]], given: bytes | None
) -> list[tuple[bytes, bytes]]:
    """The headers with one id: the client's, else the handler's, else a new one."""
    if given is None:
        if any(name == b"x-request-id" for name, _ in headers):
            return list(headers)
        return [*headers, (b"x-request-id", uuid.uuid4().hex.encode())]
    others = [header for header in headers if header[0] != b"x-request-id"]
    return [*others, (b"x-request-id", given)]
