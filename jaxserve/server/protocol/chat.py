"""POST /v1/chat/completions: its body and its answer."""

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.common import GenerationRequest, Usage
from jaxserve.server.protocol.decoding import UNSUPPORTED_BY_ALL, BodyDecoder
from jaxserve.server.protocol.structured_output import ResponseFormat, StructuredOutputs

# Options of completions and of older or other APIs, which would do nothing here.
UNSUPPORTED_IN_CHAT: Final = UNSUPPORTED_BY_ALL | {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt": (),
    "thinking_token_budget": (),
    "verbosity": (),
    "web_search_options": (),
}


class ContentPart(Struct, frozen=True):
    """A part of a message's content: a text, or an assistant's refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    """A call in a message of the assistant. arguments: JSON text of an object, or the object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(Struct, frozen=True, kw_only=True):
    """One of `tool_calls` in a message of the assistant."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    """A function the model may call. parameters: JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """One of `tools`."""

    type: str = "function"
    function: FunctionDefinition | None = None


class FunctionName(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    """A tool by its name."""

    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(Struct, frozen=True, kw_only=True):
    """Some of `tools`. mode: auto or required."""

    mode: str
    tools: list[NamedTool]


class ToolChoice(Struct, frozen=True, kw_only=True):
    """`tool_choice` as an object: a function that must be called, or the tools that may be."""

    type: str = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
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


class ResponseFunction(Struct, frozen=True, kw_only=True):
    """What is called. arguments: JSON as the model wrote it; perhaps not valid, or cut off."""

    name: str
    arguments: str


class ResponseToolCall(Struct, frozen=True, kw_only=True):
    """A call that the client is to make."""

    id: str
    type: Literal["function"] = "function"
    function: ResponseFunction


class ResponseMessage(Struct, frozen=True, kw_only=True):
    """What the model said. reasoning_content: the older name of `reasoning`, which has the same.

    Left out where the model gives none: tool_calls, reasoning, reasoning_content.
    """

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
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


class DeltaFunction(Struct, frozen=True, kw_only=True):
    """name: with the first piece of the call only."""

    name: str | UnsetType = UNSET
    arguments: str


class DeltaToolCall(Struct, frozen=True, kw_only=True):
    """A piece of a call. id, type: with the first piece of the call only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: DeltaFunction


class DeltaMessage(Struct, frozen=True, kw_only=True):
    """A piece of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: DeltaMessage
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


decode_chat_request = BodyDecoder(ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
