"""The socket of a server: bound first, so that mistakes show, listening when it is ready."""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import UserError

_BACKLOG = 2048  # connections that wait to be accepted
_WILDCARD_HOSTS = ("", "0.0.0.0", "::")


class Listener:
    """A bound socket. Clients are refused until `listen`; a Unix socket's file goes with `close`.

    Raises:
      UserError: the address, the port or the path cannot be used.
    """

    def __init__(self, server: ServerConfig):
        self._server = server
        self._file_id: tuple[int, int] | None = None
        if server.uds:
            self.socket = _bind_unix(server.uds)
            self._file_id = _file_id(server.uds)
        else:
            self.socket = _bind_tcp(server.host, server.port)

    def listen(self) -> None:
        """Of two servers that bound the same address, one fails here.

        Raises:
          UserError: the address was taken since it was bound.
        """
        server = self._server
        if server.uds and _file_id(server.uds) != self._file_id:
            raise _uds_taken(server.uds)
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise _tcp_error(server.host, server.port, error) from error

    def close(self) -> None:
        """Closes the socket and removes its file, if the file is still this socket's."""
        if self._server.uds and _file_id(self._server.uds) == self._file_id:
            with contextlib.suppress(OSError):
                os.unlink(self._server.uds)
        self.socket.close()

    def url(self) -> str:
        """Where clients find the server."""
        server = self._server
        scheme = "https" if server.ssl_certfile else "http"
        if server.uds:
            return f"{scheme}://localhost"
        host = "127.0.0.1" if server.host in _WILDCARD_HOSTS else server.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def _file_id(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _bind_unix(path: str) -> socket.socket:
    """A file that a dead server left is replaced."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise UserError(f"--uds {path} is not a socket.", fix="Name a file that is not there.")
        if _is_alive(path):
            raise _uds_taken(path)
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)  # a path that is too long has no errno
        raise UserError(
            f"--uds {path} cannot be used: {reason}.",
            fix="Use a short path in a directory that you may write, such as --uds /tmp/llm.sock.",
        ) from error
    return listener


def _is_alive(path: str) -> bool:
    """Whether a server listens there, or may."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # such as a full backlog: somebody is there
        return True


def _uds_taken(path: str) -> UserError:
    other = Path(path).with_suffix(".2.sock")
    return UserError(
        f"--uds {path} is taken: another program listens there.",
        fix=f"Use another one, such as --uds {other}.",
    )


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} is not an address: {error}.", fix="Use --host 127.0.0.1."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _tcp_error(host, port, error) from error
    return listener


def _tcp_error(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"--port {port} is taken: another program listens there.",
            fix=f"Use another one, such as --port {_free_port(host, port)}.",
        )
    if error.errno == errno.EACCES:
        return UserError(f"--port {port} needs root.", fix="Use --port 8000.")
    return UserError(
        f"--host {host} cannot be listened on: {error.strerror}.",
        fix="Use --host 127.0.0.1, or --host 0.0.0.0 for every network.",
    )


def _free_port(host: str, taken: int) -> int:
    """The next port that nobody listens on."""
    for port in range(taken + 1, min(taken + 50, 65536)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    return 8000 if taken != 8000 else 8080
