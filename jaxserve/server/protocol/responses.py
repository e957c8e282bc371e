"""POST /v1/responses and what follows it: the body, the response object, the events of a stream."""

from typing import Annotated, Any, Final, Literal

from msgspec import Struct

from jaxserve.server.protocol.common import GenerationRequest, doc
from jaxserve.server.protocol.decoding import BodyDecoder, unsupported_but
from jaxserve.server.protocol.logprobs import ChatTokenLogprob
from jaxserve.server.protocol.structured_output import StructuredOutputs

type ItemStatus = Literal["in_progress", "completed", "incomplete"]
type ResponseStatus = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]

# --- the body ------------------------------------------------------------------------------------

UNSUPPORTED_IN_RESPONSES: Final = unsupported_but(
    "background",
    "chat_template_kwargs",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "structured_outputs",
    "text",
) | {
    "access_programs": (),
    "background_options": ({},),
    "best_of": (1,),
    "context_management": ([],),
    "conversation": (),
    "image": ({},),
    "logprob_token_ids": (),
    "logprobs": (False,),
    "max_tokens": (),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "previous_input_messages": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}


class InputContent(Struct, frozen=True):
    """A part of an item: input_text, output_text, refusal, summary_text or reasoning_text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """One item of `input`: a message, a reasoning, a function_call or a function_call_output.

    What a response's `output` holds can be given back as it is.
    """

    type: str | None = None
    role: str | None = None
    content: str | list[InputContent] | None = None
    summary: list[InputContent] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputContent] | None = None


class ResponseTool(Struct, frozen=True, kw_only=True):
    """One of `tools`; only functions are known. parameters: JSON schema of the arguments."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class AllowedTool(Struct, frozen=True):
    """A tool by its name."""

    type: str
    name: str | None = None


class ResponseToolChoice(Struct, frozen=True, kw_only=True):
    """`tool_choice` as an object. type: function (with name) or allowed_tools (mode and tools)."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """`text.format`. type: text, json_object or json_schema (with name and schema)."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """`text`. verbosity: only null."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """`reasoning`. There are no summaries: the items hold the whole reasoning."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | list[InputItem],
        doc("What the user says, or items of the conversation.", error="an unknown kind of item"),
    ]
    instructions: Annotated[
        str | None,
        doc("The system message, before all else; not part of the conversation.", default="none"),
    ] = None
    previous_response_id: Annotated[
        str | None,
        doc(
            "The conversation goes on from this response.",
            default="a new one",
            error="not kept (404), or not at its end yet",
        ),
    ] = None
    max_output_tokens: Annotated[
        int | None,
        doc(
            "Most tokens of the answer, reasoning included.",
            default="the rest of the context",
            error="below 1, or more than the context has",
        ),
    ] = None
    tools: Annotated[
        list[ResponseTool] | None,
        doc("Functions that the model may call.", default="none", error="no function"),
    ] = None
    tool_choice: Annotated[
        str | ResponseToolChoice | None,
        doc(
            "none, auto, required, a function, or the tools that are allowed.",
            default="auto",
            error="without tools, a tool that is not among them, or calls and nothing else "
            "together with a format of the text",
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("There may be several calls.", default="true")
    ] = None
    text: Annotated[
        TextOptions | None,
        doc("What the answer must look like.", default="text", error="an invalid schema"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        doc("vLLM's way to say that.", default="none", error="together with text.format"),
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None,
        doc("effort: how much the model thinks.", default="its own", error="a summary"),
    ] = None
    include: Annotated[
        list[str] | None,
        doc(
            "message.output_text.logprobs: the log-probabilities of the text.",
            default="none",
            error="anything else",
        ),
    ] = None
    top_logprobs: Annotated[
        int | None,
        doc(
            "That many likeliest tokens too; any but 0 includes log-probabilities.",
            default="0",
            error="below 0, or above --max-logprobs",
        ),
    ] = None
    store: Annotated[
        bool | None,
        doc(
            "The response can be had again, and gone on from.",
            default="true",
            error="true with --response-store-bytes 0",
        ),
    ] = None
    background: Annotated[
        bool | None,
        doc(
            "Answer at once; the response is made meanwhile, and can be cancelled.",
            default="false",
            error="with store: false",
        ),
    ] = None
    metadata: Annotated[
        dict[str, str] | None,
        doc(
            "Given back with the response.",
            default="none",
            error="over 16 pairs, a key over 64 or a value over 512 characters",
        ),
    ] = None
    safety_identifier: Annotated[str | None, doc("Whom the request is for; has no effect.")] = None
    prompt_cache_key: Annotated[
        str | None, doc("Has no effect: the prefix cache needs no hints.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("More variables for the chat template.", default="none")
    ] = None


decode_responses_request = BodyDecoder(ResponsesRequest, UNSUPPORTED_IN_RESPONSES)


# --- the answer ----------------------------------------------------------------------------------


class OutputText(Struct, frozen=True, tag="output_text", kw_only=True):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


class OutputMessage(Struct, frozen=True, tag="message", kw_only=True):
    """What the model says."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, tag="reasoning", kw_only=True):
    """What the model thinks before it speaks. There are no summaries: `content` is all of it."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(Struct, frozen=True, tag="function_call", kw_only=True):
    """A call that the client is to make. arguments: JSON, as the model wrote it."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    message: str
    code: str = "server_error"


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response: what was asked, and what is known of the answer."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(Struct, frozen=True, kw_only=True):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# --- the events of a stream ----------------------------------------------------------------------


class _Lifecycle(Struct, frozen=True, kw_only=True):
    sequence_number: int
    response: ResponseObject


class Created(_Lifecycle, frozen=True, tag="response.created"):
    """First of all events."""


class Queued(_Lifecycle, frozen=True, tag="response.queued"):
    """A background response waits."""


class InProgress(_Lifecycle, frozen=True, tag="response.in_progress"):
    """The model is at work."""


class Completed(_Lifecycle, frozen=True, tag="response.completed"):
    """The last event of an answer that is whole."""


class Incomplete(_Lifecycle, frozen=True, tag="response.incomplete"):
    """The last event of an answer that was cut off, or that a client cancelled."""


class Failed(_Lifecycle, frozen=True, tag="response.failed"):
    """The last event of an answer that broke off."""


class _ItemEvent(Struct, frozen=True, kw_only=True):
    sequence_number: int
    output_index: int
    item: OutputItem


class ItemAdded(_ItemEvent, frozen=True, tag="response.output_item.added"):
    """An item begins; it is empty still."""


class ItemDone(_ItemEvent, frozen=True, tag="response.output_item.done"):
    """An item is whole."""


class _PartEvent(Struct, frozen=True, kw_only=True):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class PartAdded(_PartEvent, frozen=True, tag="response.content_part.added"):
    """The content of an item begins; it is empty still."""


class PartDone(_PartEvent, frozen=True, tag="response.content_part.done"):
    """The content of an item is whole."""


class _TextEvent(Struct, frozen=True, kw_only=True):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0


class OutputTextDelta(_TextEvent, frozen=True, tag="response.output_text.delta"):
    """More of a message."""

    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_TextEvent, frozen=True, tag="response.output_text.done"):
    """All of a message."""

    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(_TextEvent, frozen=True, tag="response.reasoning_text.delta"):
    """More of a reasoning item."""

    delta: str


class ReasoningDone(_TextEvent, frozen=True, tag="response.reasoning_text.done"):
    """All of a reasoning item."""

    text: str


class ArgumentsDelta(
    Struct, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Struct, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
