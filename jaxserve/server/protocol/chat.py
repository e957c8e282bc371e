"""POST /v1/chat/completions: its body and its answer."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.common import GenerationRequest, Usage, doc
from jaxserve.server.protocol.decoding import BodyDecoder, unsupported_but
from jaxserve.server.protocol.logprobs import ChatLogprobs, PromptLogprobs
from jaxserve.server.protocol.structured_output import ResponseFormatField, StructuredOutputsField

# Options of completions and of older or other APIs, which would do nothing here.
UNSUPPORTED_IN_CHAT: Final = unsupported_but(
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "include_reasoning",
    "max_completion_tokens",
    "messages",
    "parallel_tool_calls",
    "reasoning_effort",
    "structured_outputs",
) | {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
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

    messages: Annotated[
        list[ChatMessage],
        doc(
            "The chat so far, in roles that the model's chat template takes.",
            error="empty, no text, or refused by the chat template",
        ),
    ]
    max_completion_tokens: Annotated[
        int | None,
        doc("The newer name of max_tokens.", default="max_tokens", error="another max_tokens"),
    ] = None
    logprobs: Annotated[bool | None, doc("Log-probabilities of the tokens.", default="false")] = (
        None
    )
    top_logprobs: Annotated[
        int | None,
        doc(
            "With logprobs, of that many likeliest tokens in their place too; -1 is the whole "
            "vocabulary.",
            default="0",
            error="without logprobs, below -1, or above --max-logprobs",
        ),
    ] = None
    response_format: ResponseFormatField = None
    structured_outputs: StructuredOutputsField = None
    tools: Annotated[
        list[Tool] | None,
        doc(
            "Functions the model may call.",
            default="none",
            error="no function, parameters of no object, two of one name, or over 1024",
        ),
    ] = None
    tool_choice: Annotated[
        str | ToolChoice | None,
        doc(
            "none: no call. auto: the model decides. required: calls and nothing else. A function: "
            "one call of it. allowed_tools: auto or required, of some of the tools.",
            default="auto with tools, else none",
            error="no such tool, auto where the server cannot read the model's calls, or calls and "
            "nothing else together with a format of the content",
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("There may be several calls in an answer.", default="true")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        doc(
            "For the chat template: none, minimal, low, medium, high, xhigh or max.",
            default="the template's",
            error="a template that does not read it",
        ),
    ] = None
    include_reasoning: Annotated[
        bool | None,
        doc("The answer has the reasoning, where --reasoning-parser finds it.", default="true"),
    ] = None
    echo: Annotated[
        bool | None,
        doc(
            "The content begins with that of the last message, if its role is the answer's.",
            default="false",
        ),
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        doc(
            "The chat template opens the assistant's turn.",
            default="true, unless continue_final_message",
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        doc(
            "The answer goes on with the last message.",
            default="false",
            error="with add_generation_prompt, or a last message without text",
        ),
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None,
        doc(
            "For the chat template: what to answer from.",
            default="none",
            error="a template that does not read them",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        doc(
            "Instead of the model's, at most 5 s of work.",
            default="the model's",
            error="without --trust-request-chat-template, or not valid",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        doc(
            "More variables for the chat template.",
            default="--default-chat-template-kwargs",
            error="one that the template does not read, or that another field sets",
        ),
    ] = None

    def sampling_params(self) -> SamplingParams:
        """With max_completion_tokens, the new name of max_tokens, and the log-probabilities."""
        changes: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise RequestError(
                    "max_tokens and max_completion_tokens differ; give one of them.",
                    param="max_completion_tokens",
                )
            changes |= {"max_tokens": self.max_completion_tokens, "max_completion_tokens": None}
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        request = msgspec.structs.replace(self, **changes) if changes else self
        params = GenerationRequest.sampling_params(request)
        if not self.logprobs:
            return params
        try:
            return msgspec.structs.replace(params, logprobs=self.top_logprobs or 0)
        except RequestError as error:
            message = error.message.replace("logprobs", "top_logprobs", 1)
            raise RequestError(message, param="top_logprobs") from error


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
    """A choice. finish_reason: stop, length or tool_calls.

    stop_reason: the stop string or the stop token id of the request that ended it.
    token_ids: with return_token_ids, else left out.
    """

    index: int
    message: ResponseMessage
    finish_reason: str
    stop_reason: int | str | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The whole answer. prompt_logprobs, prompt_token_ids: as asked for, else left out."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


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
    """What a choice gained. finish_reason: null while it goes on."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream. prompt_token_ids: of the first one, with return_token_ids."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


decode_chat_request = BodyDecoder(ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
