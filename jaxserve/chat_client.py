"""`jaxserve chat`: a conversation in the terminal with a running server."""

import contextlib
import http.client
import io
import json
import sys
import urllib.parse
from collections.abc import Generator, Iterator
from typing import Any, TextIO

from jaxserve.errors import UserError

_TIMEOUT_S = 600  # a first token may wait behind a long queue


class ServerError(Exception):
    """The server refused a request or broke off its answer."""


class ChatClient:
    """Keeps one conversation and sends it whole with every question.

    An answer that is stopped or breaks off stays in the conversation as far as it came; a question
    that got no answer at all is taken back.
    """

    def __init__(self, url: str, *, api_key: str | None = None, **options: object):
        """options: fields of each request body, such as max_tokens; None leaves one out.

        Raises:
          UserError: `url` is not an http or https address.
        """
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError(
                f"--url {url} is not a server's address.",
                fix="Use one such as --url http://127.0.0.1:8000.",
            )
        self.url = url
        self.messages: list[dict[str, str]] = []
        self._secure = parts.scheme == "https"
        self._address = (parts.hostname, port)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._options = {name: value for name, value in options.items() if value is not None}

    def connect(self, model: str | None = None) -> None:
        """Makes sure that a server answers, and talks to `model` or else to its first one.

        Raises:
          UserError: no server answers there, or it refuses.
        """
        try:
            with self._request("GET", "/v1/models") as response:
                first = json.load(response)["data"][0]["id"]
        except ServerError as e:
            raise UserError(f"{self.url} refused: {e}.", fix="Check --url and --api-key.") from None
        except (OSError, http.client.HTTPException) as e:
            raise UserError(
                f"No server answers at {self.url}: {_reason(e)}.",
                fix="Start one with 'jaxserve serve MODEL', or give its address with --url.",
            ) from None
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"{self.url} does not answer as a model server.", fix="Check --url."
            ) from None
        self._options["model"] = model or first

    def ask(self, question: str) -> Generator[str]:
        """The answer's text, piece by piece. Closing the generator stops the answer.

        Raises:
          ServerError: refused, broken off, or the server is gone.
        """
        question = question.encode("utf-8", "replace").decode("utf-8")
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        except (OSError, http.client.HTTPException) as e:
            raise ServerError(f"the connection broke: {_reason(e)}") from None
        except (ValueError, AttributeError):
            raise ServerError("the answer is not a model server's") from None
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {**self._options, "messages": self.messages, "stream": True}
        with self._request("POST", "/v1/chat/completions", json.dumps(body)) as response:
            for line in response:
                field, _, data = line.decode("utf-8", "replace").strip().partition(":")
                if field != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(_error_text(event))
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
        raise ServerError("the answer broke off")

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A response of status 200; its connection ends with the block, whatever is unread."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        host, port = self._address
        with contextlib.closing(kind(host, port, timeout=_TIMEOUT_S)) as connection:
            connection.request(method, self._path + path, body=body, headers=self._headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise ServerError(_refusal(response))
                yield response


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _error_text(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error).rstrip(".")


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read(10_000).decode("utf-8", "replace")
    try:
        return f"{_error_text(json.loads(text))} (status {response.status})"
    except ValueError:
        return f"status {response.status} {response.reason}"


def _print_answer(client: ChatClient, question: str, out: TextIO) -> None:
    try:
        with contextlib.closing(client.ask(question)) as answer:
            for piece in answer:
                out.write(piece.replace("\x1b", "\u241b"))  # no escape sequences for the terminal
                out.flush()
    finally:
        out.write("\n")
        out.flush()


def _converse(client: ChatClient) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    while True:
        try:
            question = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if not question.strip():
            continue
        try:
            _print_answer(client, question, sys.stdout)
        except KeyboardInterrupt:
            print("(stopped)")
        except ServerError as e:
            print(f"jaxserve chat: {e}.", file=sys.stderr)


def chat(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    api_key: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> int:
    """Talks on the terminal until Ctrl-D; what comes through a pipe is one question.

    Returns the exit code: 1 when a piped question got no whole answer.

    Raises:
      UserError: no server at `url`, or it refuses this client.
    """
    client = ChatClient(url, api_key=api_key, max_tokens=max_tokens, temperature=temperature)
    client.connect(model)
    if system is not None:
        client.messages.append({"role": "system", "content": system})
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stdin.isatty():
        _converse(client)
        return 0
    question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not question:
        raise UserError("The question is empty.", fix="Try: echo 'Why is the sky blue?' | ...")
    try:
        _print_answer(client, question, sys.stdout)
    except ServerError as e:
        print(f"jaxserve chat: {e}.", file=sys.stderr)
        return 1
    return 0
