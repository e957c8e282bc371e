"""POST /v1/chat/completions: its body and its answer."""

from typing import Any, Final

import msgspec
from msgspec import Struct

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.common import GenerationRequest, Usage
from jaxserve.server.protocol.decoding import (
    CHAT_OPTIONS_UNSUPPORTED,
    UNSUPPORTED_BY_ALL,
    BodyDecoder,
)

# An option of one route is refused on the other, where it would do nothing.
UNSUPPORTED_IN_CHAT: Final = (
    UNSUPPORTED_BY_ALL
    | CHAT_OPTIONS_UNSUPPORTED
    | {"best_of": (1,), "logprobs": (False,), "prompt": ()}
)


class ContentPart(Struct, frozen=True):
    """A part of a message's content; only text is known."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_params(self) -> SamplingParams:
        """With max_completion_tokens, the new name of max_tokens."""
        if self.max_completion_tokens is None:
            return super().sampling_params()
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise RequestError(
                "max_tokens and max_completion_tokens differ; give one of them.",
                param="max_completion_tokens",
            )
        return msgspec.structs.replace(
            self, max_tokens=self.max_completion_tokens, max_completion_tokens=None
        ).sampling_params()


class ResponseMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ResponseMessage
    finish_reason: str
    stop_reason: int | str | None
    logprobs: None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


decode_chat_request = BodyDecoder(ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
