"""Who may ask: API keys, other web sites, TLS; and the operator's mistakes about them."""

import hashlib
import hmac
import ssl
from collections.abc import Sequence
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.config import ServerConfig
from jaxserve.errors import RequestError, UserError
from jaxserve.server.http import error_of, send_json
from jaxserve.server.routing import Route


def check_server_config(server: ServerConfig) -> None:
    """Raises UserError for options that would do nothing, or more than they say."""
    if server.allow_credentials and not server.allowed_origins:
        raise UserError(
            "--allow-credentials does nothing without --allowed-origins.",
            fix="Name the sites, such as --allowed-origins https://chat.example.",
        )
    if server.allow_credentials and "*" in server.allowed_origins:
        raise UserError(
            "--allow-credentials with --allowed-origins * lets any site act as its visitor.",
            fix="Name the sites, such as --allowed-origins https://chat.example.",
        )
    root = server.root_path
    if root and (not root.startswith("/") or root.endswith("/")):
        raise UserError(
            f"--root-path {root} is not a path.",
            fix=f"Use --root-path /{root.strip('/') or 'llm'}.",
        )


def guard(app: ASGIApp, api_keys: Sequence[str], routes: Sequence[Route]) -> ASGIApp:
    """Asks for a key, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, everywhere but on open
    routes; in a time that does not depend on the key."""
    open_paths = frozenset(route.path for route in routes if route.is_open)
    error_of_path = {route.path: route.error_of for route in routes}
    wanted = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in open_paths:
            digest = hashlib.sha256(_given_key(scope)).digest()
            # Every key is compared, so that the time does not tell which one is near.
            if not any([hmac.compare_digest(digest, each) for each in wanted]):
                error = RequestError("The API key is missing or wrong.", status=401)
                status, body = error_of_path.get(scope["path"], error_of)(error)
                challenge = [(b"www-authenticate", b"Bearer")]
                await send_json(send, body, status=status, headers=challenge)
                return
        await app(scope, receive, send)

    return guarded


def _given_key(scope: Scope) -> bytes:
    """The key of the first header that has one; empty when none has."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":
            return value.strip()
    return b""


def allow_origins(app: ASGIApp, server: ServerConfig) -> ASGIApp:
    """Tells browsers that pages of `--allowed-origins` may ask."""
    return CORSMiddleware(
        app,
        allow_origins=server.allowed_origins,
        allow_methods=server.allowed_methods,
        allow_headers=server.allowed_headers,
        allow_credentials=server.allow_credentials,
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def make_ssl_context(server: ServerConfig) -> ssl.SSLContext | None:
    """What TLS needs; None without `--ssl-certfile`.

    Raises:
      UserError: a file cannot be used, or an option has no effect.
    """
    if not server.ssl_certfile:
        for option, value in (
            ("--ssl-keyfile", server.ssl_keyfile),
            ("--ssl-ca-certs", server.ssl_ca_certs),
            ("--ssl-cert-reqs", server.ssl_cert_reqs),
        ):
            if value:
                raise UserError(
                    f"{option} {value} does nothing without --ssl-certfile.",
                    fix="Name the certificate too, such as --ssl-certfile cert.pem.",
                )
        return None
    if server.ssl_cert_reqs and not server.ssl_ca_certs:
        raise UserError(
            f"--ssl-cert-reqs {server.ssl_cert_reqs} needs --ssl-ca-certs.",
            fix="Name what signs the clients' certificates, such as --ssl-ca-certs ca.pem.",
        )
    if server.ssl_ca_certs and not server.ssl_cert_reqs:
        raise UserError(
            f"--ssl-ca-certs {server.ssl_ca_certs} does nothing without --ssl-cert-reqs.",
            fix="Use --ssl-cert-reqs 2 to ask every client for a certificate.",
        )
    return _load_certificates(server)


def _load_certificates(server: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    keyfile = server.ssl_keyfile or server.ssl_certfile
    _check_readable("--ssl-certfile", server.ssl_certfile)
    if server.ssl_keyfile:
        _check_readable("--ssl-keyfile", server.ssl_keyfile)
    try:
        # An encrypted key would make openssl ask on the terminal.
        context.load_cert_chain(server.ssl_certfile, keyfile, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"--ssl-certfile {server.ssl_certfile} with the key in {keyfile} cannot be used: "
            f"{_reason(error)}.",
            fix="Give a PEM certificate and its own key, without a password.",
        ) from error
    if server.ssl_ca_certs:
        _check_readable("--ssl-ca-certs", server.ssl_ca_certs)
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except ssl.SSLError as error:
            raise UserError(
                f"--ssl-ca-certs {server.ssl_ca_certs} cannot be used: {_reason(error)}.",
                fix="Give a PEM file of certificates.",
            ) from error
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    return context


def _check_readable(option: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be read: {error.strerror}.", fix="Give the path of a PEM file."
        ) from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else str(error)
