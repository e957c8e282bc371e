"""The routes that generate nothing: models, probes, metrics, the prefix cache, adapters."""

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve import __version__
from jaxserve.errors import RequestError
from jaxserve.metrics import CONTENT_TYPE
from jaxserve.server.generation import ServerContext
from jaxserve.server.http import send_bytes, send_json
from jaxserve.server.protocol.common import ModelCard, ModelList


class Status(msgspec.Struct, frozen=True):
    """All is well."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str


class ServerLoad(msgspec.Struct, frozen=True):
    """How many requests that generate are not answered whole yet."""

    server_load: int


class Operations:
    """Handlers over one server."""

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
        """GET /health, GET and POST /ping: 200 when the engine can run a step, else 503 and the
        reason."""
        error = self._context.llm.dead_error
        if error is not None:
            raise error
        await send_json(send, Status())

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /version."""
        await send_json(send, Version(__version__))

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /load."""
        await send_json(send, ServerLoad((await self._context.counts()).num_generating))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics."""
        page = self._context.metrics.render(await self._context.counts())
        await send_bytes(send, page, CONTENT_TYPE.encode())

    async def reset_prefix_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /reset_prefix_cache: 409 when blocks are in use; idle engine cores are reset."""
        if not await self._context.llm.reset_prefix_cache():
            several = self._context.config.parallel.data_parallel_size > 1
            rest = "only idle engine cores were" if several else "nothing was"
            raise RequestError(f"KV blocks are in use; {rest} reset.", status=409)
        await send_json(send, Status())

    async def adapters(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/load_lora_adapter and /v1/unload_lora_adapter: 501."""
        raise RequestError("This version of jaxserve has no LoRA adapters.", status=501)
