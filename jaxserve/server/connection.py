"""One HTTP connection and the server of all: what uvicorn leaves open to slow or odd clients."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxserve.server.http import encode_json, error_body

MAX_HEAD_BYTES = 65_536
_CONNECTION_GRACE_S = 1
_KEEP_ALIVE_S = 60
_LINGER_S = 1.0  # how long a client that was refused may take to read why
_UPGRADE_HEADER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """Closes a connection whose request does not come whole in time, or has too long a head.

    The time runs from the connection's beginning, and from the first byte of each later request, to
    the last byte of its body. A client that closes its side has left, whatever it still waits for.
    `Upgrade` is ignored, as a server may (RFC 9110, 7.8); the parser would stop before the body.
    """

    def __init__(self, *args: Any, request_timeout_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timeout_s = request_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._head_len = 0
        self._is_refused = False

    # uvicorn says asyncio.Transport where asyncio says BaseTransport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._timer is None:
            self._restart_timer()
        if not self._in_body:
            data = _UPGRADE_HEADER.sub(b"\r\nignored:", data)
            self._head_len += len(data)
        super().data_received(data)
        if not self._in_body and self._head_len > MAX_HEAD_BYTES:
            self._refuse(431, f"The head of the request is longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # it follows another one in the same data
            self._restart_timer()

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_len = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is not None:  # the next request could not be read before
            self._restart_timer()

    def send_400_response(self, msg: str) -> None:
        """Called when what came is no HTTP."""
        self._refuse(400, "The request is not valid HTTP/1.1.")

    def _restart_timer(self) -> None:
        self._stop_timer()
        if self._timeout_s:
            self._timer = self.loop.call_later(self._timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()  # an answer would be to nobody's question
        elif self.cycle.more_body:
            self._refuse(408, f"The request did not come whole within {self._timeout_s:g} s.")
        else:
            self._restart_timer()  # the server is at work; the next request has to wait

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless another answer has begun, and closes."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = encode_json(error_body(status, message))
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app must not write any more
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            # To close with bytes unread would reset the connection, and lose the answer.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us and says when it listens."""

    def __init__(
        self,
        app: ASGIApp,
        on_listening: Callable[[], None],
        *,
        request_timeout_s: float = 0,
        ssl_context: ssl.SSLContext | None = None,
    ):
        def make_connection(*args: Any, **kwargs: Any) -> Connection:
            return Connection(*args, request_timeout_s=request_timeout_s, **kwargs)

        http: Any = make_connection  # uvicorn calls it like a class
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CONNECTION_GRACE_S,
                ssl_context_factory=None if ssl_context is None else lambda *_: ssl_context,
            )
        )
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()
