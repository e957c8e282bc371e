"""/tokenize, /detokenize, /tokenizer_info: the served model's tokenizer and chat template."""

from starlette.types import Receive, Scope, Send

from jaxserve.errors import RequestError
from jaxserve.sampling_params import shorten
from jaxserve.server.chat_generation import check_chat_template
from jaxserve.server.generation import ServerContext, check_model
from jaxserve.server.http import read_body, send_json
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.tokenize import (
    DetokenizedText,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
    decode_detokenize_request,
    decode_tokenize_request,
)

_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


class Tokenization:
    """The routes' handlers."""

    def __init__(self, context: ServerContext):
        self._context = context
        self._model_name = context.config.model.served_model_name
        self._vocab_size = context.config.info.vocab_size

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /tokenize."""
        context = self._context
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_tokenize_request(body)
        if request.model is not None:
            check_model(context, request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("Give prompt or messages, one of them.", param="prompt")
        if request.prompt is None:
            token_ids = await self._chat(request)
        else:
            token_ids = await self._text(request, request.prompt)
        strings = None
        if request.return_token_strs:
            id_to_token = context.renderer.tokenizer.backend.id_to_token
            strings = [id_to_token(token_id) or "" for token_id in token_ids]
        max_model_len = context.config.model.max_model_len
        await send_json(send, Tokens(len(token_ids), max_model_len, token_ids, strings))

    async def _text(self, request: TokenizeRequest, text: str) -> list[int]:
        for name in _CHAT_FIELDS:
            if getattr(request, name):
                raise RequestError(f"{name} goes with messages, not with a prompt.", param=name)
        prompts = await self._context.renderer.completion(
            text, add_special_tokens=request.add_special_tokens is not False, is_truncated=True
        )
        return prompts[0][0]

    async def _chat(self, request: TokenizeRequest) -> list[int]:
        assert request.messages is not None
        chat = ChatCompletionRequest(
            model=self._model_name,
            messages=request.messages,
            add_special_tokens=request.add_special_tokens,
            truncate_prompt_tokens=-1,  # a chat of any length is tokenized
            **{name: getattr(request, name) for name in _CHAT_FIELDS},
        )
        check_chat_template(self._context, chat)
        return (await self._context.renderer.chat(chat)).token_ids

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /detokenize."""
        context = self._context
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_detokenize_request(body)
        if request.model is not None:
            check_model(context, request.model)
        for i, token_id in enumerate(request.tokens):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"Token id {shorten(token_id)} is not in the vocabulary of "
                    f"{self._vocab_size} tokens.",
                    param=f"tokens[{i}]",
                )
        tokenizer = context.renderer.tokenizer
        text = await context.renderer.in_thread(
            lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)
        )
        await send_json(send, DetokenizedText(text))

    async def info(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /tokenizer_info: what a client needs to know that tokenizes with the other two."""
        tokenizer = self._context.renderer.tokenizer
        special = tokenizer.special_tokens
        info = TokenizerInfo(
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            pad_token=special.get("pad_token"),
            unk_token=special.get("unk_token"),
            chat_template=tokenizer.chat_template,
        )
        await send_json(send, info)
