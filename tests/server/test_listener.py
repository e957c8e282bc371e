"""Unix sockets and TLS: what starts, what is refused in two lines, and what is left behind."""

import asyncio
import contextlib
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import UserError
from jaxserve.server.listener import Listener
from jaxserve.server.security import make_ssl_context
from tests.conftest import ROOT
from tests.fakes_engine import MODEL
from tests.server.live import Live, run

TLS = ROOT / "tests" / "goldens" / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")


@contextlib.contextmanager
def bound(path: str) -> Iterator[Listener]:
    with contextlib.closing(Listener(ServerConfig(uds=path))) as listener:
        yield listener


def refusal(path: str) -> str:
    """Why a server cannot listen there."""
    with pytest.raises(UserError) as caught:
        Listener(ServerConfig(uds=path)).close()
    assert caught.value.fix
    return caught.value.problem


# --- Unix sockets --------------------------------------------------------------------------------


def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")

    async def test(live: Live) -> None:
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, base_url=live.url) as client:
            body = {"model": MODEL, "prompt": "ab"}
            response = await client.post("/v1/completions", json=body)
            assert response.json()["choices"][0]["text"] == "ab"
            response = await client.post("/v1/completions", json=body | {"stream": True})
            assert response.text.endswith("data: [DONE]\n\n")

    run(test, uds=path)
    assert not os.path.exists(path)


def test_a_client_is_refused_until_it_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with bound(path) as listener, socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConnectionRefusedError):
            client.connect(path)
        listener.listen()
        client.connect(path)
    assert not os.path.exists(path)


def test_the_file_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    with bound(path) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(path)


def test_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with bound(path) as listener:
        listener.listen()
        assert f"--uds {path} is taken" in refusal(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_of_two_that_start_at_once_the_first_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with bound(path) as first, bound(path) as second:
        second.listen()
        with pytest.raises(UserError, match=re.escape(f"--uds {path} is taken")):
            first.listen()
        first.close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert "is not a socket" in refusal(str(file))
    assert file.read_text() == "mine"
    assert "is not a socket" in refusal(str(tmp_path))
    assert "cannot be used: No such file" in refusal(str(tmp_path / "nowhere" / "s.sock"))
    assert "too long" in refusal(str(tmp_path / ("x" * 200)))


# --- TLS -----------------------------------------------------------------------------------------


def test_tls() -> None:
    async def test(live: Live) -> None:
        assert live.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=CERT)
        async with httpx.AsyncClient(base_url=live.url, verify=trusted) as client:
            body = {"model": MODEL, "prompt": "ab", "stream": True}
            response = await client.post("/v1/completions", json=body)
            assert response.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=live.url) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health")
        reader, _ = await live.open(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).startswith(b"HTTP/1.1 200")

    run(test, ssl_certfile=CERT, ssl_keyfile=KEY)


def test_clients_bring_certificates() -> None:
    async def test(live: Live) -> None:
        trusted = ssl.create_default_context(cafile=CERT)
        async with httpx.AsyncClient(base_url=live.url, verify=trusted) as client:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                await client.get("/health")
        trusted = ssl.create_default_context(cafile=CERT)
        trusted.load_cert_chain(CERT, KEY)
        async with httpx.AsyncClient(base_url=live.url, verify=trusted) as client:
            assert (await client.get("/health")).status_code == 200

    run(test, ssl_certfile=CERT, ssl_keyfile=KEY, ssl_ca_certs=CERT, ssl_cert_reqs=2)


def test_a_key_in_the_same_file(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(CERT).read_text() + Path(KEY).read_text())
    assert make_ssl_context(ServerConfig(ssl_certfile=str(both))) is not None
    assert make_ssl_context(ServerConfig()) is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ssl_certfile": "nowhere.pem"}, "--ssl-certfile nowhere.pem cannot be read: No such"),
        ({"ssl_certfile": CERT, "ssl_keyfile": "no.pem"}, "--ssl-keyfile no.pem cannot be read"),
        ({"ssl_certfile": CERT}, "cannot be used"),
        ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "cannot be used"),
        ({"ssl_certfile": __file__, "ssl_keyfile": KEY}, "cannot be used"),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": str(TLS / "other_key.pem")},
            "key values mismatch",
        ),
        ({"ssl_certfile": CERT, "ssl_keyfile": str(TLS / "encrypted_key.pem")}, "cannot be used"),
        ({"ssl_keyfile": KEY}, "does nothing without --ssl-certfile"),
        ({"ssl_ca_certs": CERT}, "does nothing without --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 does nothing without --ssl-certfile"),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_cert_reqs": 1},
            "--ssl-cert-reqs 1 needs --ssl-ca-certs",
        ),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_ca_certs": CERT},
            "does nothing without --ssl-cert-reqs",
        ),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_ca_certs": KEY, "ssl_cert_reqs": 2},
            f"--ssl-ca-certs {KEY} cannot be used",
        ),
    ],
)
def test_files_that_cannot_be_used(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        make_ssl_context(ServerConfig(**fields))
    assert problem in caught.value.problem
    assert "\n" not in caught.value.problem + caught.value.fix


def test_a_slow_handshake_holds_nobody_up() -> None:
    async def test(live: Live) -> None:
        await live.open(b"\x16\x03")
        trusted = ssl.create_default_context(cafile=CERT)
        async with httpx.AsyncClient(base_url=live.url, verify=trusted) as client:
            assert (await asyncio.wait_for(client.get("/health"), 5)).status_code == 200

    run(test, ssl_certfile=CERT, ssl_keyfile=KEY)
