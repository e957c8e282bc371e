"""POST /v1/completions: its body and its answer."""

from typing import Final

from msgspec import Struct

from jaxserve.server.protocol.common import GenerationRequest, Usage
from jaxserve.server.protocol.decoding import (
    CHAT_OPTIONS_UNSUPPORTED,
    UNSUPPORTED_BY_ALL,
    BodyDecoder,
)

UNSUPPORTED_IN_COMPLETIONS: Final = (
    UNSUPPORTED_BY_ALL
    | CHAT_OPTIONS_UNSUPPORTED
    | {
        "add_generation_prompt": (),
        "best_of": (1,),
        "chat_template_kwargs": ({},),
        "logprobs": (),
        "max_completion_tokens": (),
        "messages": (),
    }
)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: None = None


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


decode_completion_request = BodyDecoder(CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
