"""What chats and completions share: from token ids to a whole or streamed response."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.types import Receive, Send

from jaxserve.config import EngineConfig
from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.input_processor import InputProcessor, SequenceRequest
from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import RequestError
from jaxserve.metrics import MetricsCounts, ServerMetrics
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.chat_settings import ChatSettings
from jaxserve.server.http import (
    Encoder,
    cancelled_on_disconnect,
    collect,
    send_events,
    send_json,
    usage_of,
)
from jaxserve.server.peers import Peers
from jaxserve.server.protocol.common import Usage
from jaxserve.server.renderer import Renderer

MAX_CHOICES = 2048


@dataclass(frozen=True)
class ServerContext:
    """What every route works with. peers: None where there is one API server without others."""

    config: EngineConfig
    llm: AsyncLLM
    input_processor: InputProcessor
    renderer: Renderer
    chat: ChatSettings
    detokenizers: DetokenizerFactory
    metrics: ServerMetrics
    created_s: int
    peers: Peers | None = None

    async def counts(self) -> MetricsCounts:
        """What all API servers have counted. Raises RequestError when one does not answer."""
        return await self.peers.counts() if self.peers else self.metrics.counts()


@dataclass(frozen=True)
class ResponseHead:
    """What names one response."""

    id: str
    created: int
    model: str


class ServedRequest(Protocol):
    """What `respond` reads of a body; GenerationRequest has it."""

    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> bool | None: ...
    @property
    def include_usage(self) -> bool: ...
    @property
    def continuous_usage(self) -> bool: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def request_id(self) -> str | None: ...


class Format(Protocol):
    """How one route writes its responses; made for one request."""

    id_prefix: str

    def whole(
        self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage
    ) -> msgspec.Struct:
        """The whole response: every choice, in order of index."""
        ...

    def encoder(
        self,
        head: ResponseHead,
        *,
        n: int,
        prompt_lens: Sequence[int],
        include_usage: bool,
        continuous_usage: bool,
    ) -> Encoder:
        """For a streamed response.

        n: choices of each prompt; choice i belongs to prompt i // n.
        prompt_lens: tokens of each prompt.
        include_usage, continuous_usage: as in `stream_options`.
        """
        ...


def check_model(context: ServerContext, model: str) -> None:
    """Raises RequestError 404 when the request is for another model."""
    served = context.config.model.served_model_name
    if model != served:
        raise RequestError(
            f"The model {model[:200]!r} does not exist; this server has {served!r}.",
            param="model",
            status=404,
        )


async def respond(
    context: ServerContext,
    request: ServedRequest,
    params: SamplingParams,
    prompts: list[tuple[list[int], str]],
    response_format: Format,
    receive: Receive,
    send: Send,
    *,
    arrival_time_s: float,
    default_max_tokens: int | None,
    echo: bool = False,
) -> None:
    """Generates `params.n` choices of each prompt and sends the response.

    Args:
      prompts: token ids, and the prompt's path in the body.
      echo: the response has the prompt, so max_tokens may be 0.

    Raises:
      RequestError, EngineDeadError, ClientDisconnected: before the response has begun.
    """
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {params.n} are more than {MAX_CHOICES} choices.",
            param="n",
        )
    is_stream = bool(request.stream)
    sequences: list[SequenceRequest] = []
    for prompt_token_ids, path in prompts:
        sequences += context.input_processor.process(
            prompt_token_ids,
            params,
            arrival_time_s=arrival_time_s,
            default_max_tokens=default_max_tokens,
            first_index=len(sequences),
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            final_only=not is_stream,
            echo=echo,
            prompt_param=path,
        )
    prompt_lens = [len(s.core.prompt_token_ids) for s in sequences[:: params.n]]
    num_prompt_tokens = sum(prompt_lens)
    head = ResponseHead(
        id=f"{response_format.id_prefix}-{request.request_id or uuid.uuid4().hex}",
        created=int(arrival_time_s),
        model=request.model,
    )
    headers = [(b"x-request-id", head.id.encode())]
    async with cancelled_on_disconnect(context.llm.generate(sequences), receive) as stream:
        if is_stream:
            encoder = response_format.encoder(
                head,
                n=params.n,
                prompt_lens=prompt_lens,
                include_usage=request.include_usage,
                continuous_usage=request.continuous_usage,
            )
            await send_events(
                send,
                stream,
                encoder,
                num_prompt_tokens,
                headers,
                keep_alive_s=context.config.server.sse_keepalive_s,
            )
            return
        outputs = await collect(stream)
    usage = usage_of(
        num_prompt_tokens,
        sum(len(output.token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs if output.index % params.n == 0),
    )
    await send_json(send, response_format.whole(head, outputs, usage), headers=headers)
