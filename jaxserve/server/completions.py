"""POST /v1/completions."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from jaxserve.engine.input_processor import COMPLETION_MAX_TOKENS
from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import RequestError
from jaxserve.grammars import validate_grammar
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import ResponseHead, ServerContext, check_model, respond
from jaxserve.server.http import ChunkEncoder, Encoder, StreamEncoder, StreamUsage, read_body
from jaxserve.server.logprobs import LogprobsWriter, TextOffsets, prompt_text
from jaxserve.server.protocol.common import Usage
from jaxserve.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    decode_completion_request,
)
from jaxserve.server.protocol.logprobs import CompletionLogprobs
from jaxserve.server.structured_output import grammar_of


class Completions:
    """The route's handler."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        arrival_time_s = time.time()
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_completion_request(body)
        check_model(context, request.model)
        params = request.sampling_params()
        if request.response_format is not None or request.structured_outputs is not None:
            grammar = await context.renderer.in_thread(lambda: _grammar(context, request))
            params = msgspec.structs.replace(params, grammar=grammar)
        rendered = await context.renderer.completion(
            request.prompt,
            add_special_tokens=request.add_special_tokens is not False,
            is_truncated=params.truncate_prompt_tokens is not None,
        )
        truncate = context.input_processor.truncate
        prompts = [(truncate(ids, params, COMPLETION_MAX_TOKENS), path) for ids, path in rendered]
        await respond(
            context,
            request,
            params,
            prompts,
            CompletionFormat(context, request, params, _prompts(context, request, prompts)),
            receive,
            send,
            arrival_time_s=arrival_time_s,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            echo=bool(request.echo),
        )


def _grammar(context: ServerContext, request: CompletionRequest) -> str | None:
    """What the text must match, checked; None is anything."""
    tokenizer = context.renderer.tokenizer
    grammar = grammar_of(
        request.response_format, request.structured_outputs, tokenizer.special_token_ids
    )
    if grammar is None:
        return None
    problem = validate_grammar(grammar, tokenizer, context.config.info.vocab_size)
    if problem is not None:
        param = "response_format" if request.structured_outputs is None else "structured_outputs"
        raise RequestError(problem, param=param)
    return grammar


@dataclass(frozen=True)
class _Prompt:
    """text: what an echo has of it; "" without an echo."""

    token_ids: list[int]
    text: str


def _prompts(
    context: ServerContext, request: CompletionRequest, prompts: list[tuple[list[int], str]]
) -> list[_Prompt]:
    """A text is echoed as it was given, unless it was truncated."""
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    is_given = request.truncate_prompt_tokens is None and isinstance(texts[0], str)
    found = []
    for i, (token_ids, _) in enumerate(prompts):
        text = texts[i] if is_given else ""
        if request.echo and not is_given:
            text = prompt_text(
                context.detokenizers,
                token_ids,
                skip_special_tokens=request.skip_special_tokens is not False,
            )
        assert isinstance(text, str)
        found.append(_Prompt(token_ids, text if request.echo else ""))
    return found


class CompletionFormat:
    """Writes text_completion objects."""

    id_prefix = "cmpl"

    def __init__(
        self,
        context: ServerContext,
        request: CompletionRequest,
        params: SamplingParams,
        prompts: list[_Prompt],
    ):
        self._detokenizers = context.detokenizers
        self._request = request
        self._params = params
        self._prompts = prompts
        self._writer = LogprobsWriter(
            context.detokenizers, params, as_ids=bool(request.return_tokens_as_token_ids)
        )
        self._offsets: dict[int, TextOffsets] = {}

    def whole(self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage) -> Completion:
        """All choices at once."""
        choices = [self._choice(output, is_first=True) for output in outputs]
        return Completion(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
        )

    def encoder(
        self,
        head: ResponseHead,
        *,
        n: int,
        prompt_lens: Sequence[int],
        include_usage: bool,
        continuous_usage: bool,
    ) -> Encoder:
        """Chunks of one request."""
        fields = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
        }
        request = self._request
        is_plain = not (
            request.echo
            or request.return_token_ids
            or request.logprobs is not None
            or request.logprob_token_ids
            or continuous_usage
        )
        if is_plain:
            return StreamEncoder(
                fields,
                before_text=b'"text":',
                after_text=b"",
                no_text=b'"text":""',
                first=None,
                include_usage=include_usage,
                n=n,
            )
        usage = StreamUsage(
            include=include_usage, continuous=continuous_usage, n=n, prompt_lens=prompt_lens
        )
        return ChunkEncoder(fields, self._chunk_choices, usage)

    def _chunk_choices(self, output: RequestOutput, is_first: bool) -> Iterator[CompletionChoice]:
        yield self._choice(output, is_first=is_first)

    def _choice(self, output: RequestOutput, *, is_first: bool) -> CompletionChoice:
        request = self._request
        prompt = self._prompts[output.index // self._params.n]
        pieces = output.prompt_logprobs
        prompt_logprobs = UNSET
        if request.prompt_logprobs is not None and pieces is not None:
            prompt_logprobs = self._writer.prompt(prompt.token_ids, pieces)
        finish_reason = output.finish_reason
        return CompletionChoice(
            index=output.index,
            text=prompt.text + output.text if is_first else output.text,
            logprobs=self._logprobs(output, prompt, is_first=is_first),
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=prompt.token_ids if request.return_token_ids and is_first else UNSET,
            token_ids=output.token_ids if request.return_token_ids else UNSET,
        )

    def _logprobs(
        self, output: RequestOutput, prompt: _Prompt, *, is_first: bool
    ) -> CompletionLogprobs | None:
        """Of the output, and of the prompt before it where that is echoed."""
        if output.logprobs is None:
            return None
        if output.index not in self._offsets:
            detokenizer = self._detokenizers.make(
                prompt.token_ids,
                skip_special_tokens=self._params.skip_special_tokens,
                spaces_between_special_tokens=self._params.spaces_between_special_tokens,
            )
            self._offsets[output.index] = TextOffsets(detokenizer, start=len(prompt.text))
        found = self._writer.completion(
            output.token_ids, output.logprobs, self._offsets[output.index]
        )
        if not (is_first and self._request.echo and output.prompt_logprobs is not None):
            return found
        before = self._writer.echo(prompt.token_ids, output.prompt_logprobs, prompt.text)
        return CompletionLogprobs(
            before.text_offset + found.text_offset,
            before.token_logprobs + found.token_logprobs,
            before.tokens + found.tokens,
            before.top_logprobs + found.top_logprobs,
        )
