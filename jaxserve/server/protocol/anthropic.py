"""POST /v1/messages and its count_tokens: the bodies, the answer, the events of a stream."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Struct

from jaxserve.server.protocol.common import GenerationRequest, doc
from jaxserve.server.protocol.decoding import BodyDecoder, unsupported_but

type StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

# --- the bodies ----------------------------------------------------------------------------------

UNSUPPORTED_IN_MESSAGES: Final = unsupported_but(
    "chat_template_kwargs",
    "messages",
    "output_config",
    "stop_sequences",
    "system",
    "thinking",
) | {
    "best_of": (1,),
    "container": (),
    "context_management": ({},),
    "diagnostics": (),
    "inference_geo": (),
    "logprob_token_ids": (),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "n": (1,),
    "prompt_logprobs": (),
    "response_format": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "stop": ([],),
    "stream_options": ({},),
    "top_logprobs": (0,),
    "user_profile_id": (),
    "workspace_id": (),
}


class InputBlock(Struct, frozen=True, kw_only=True):
    """A block of a message: text, thinking, tool_use or tool_result.

    What a message's `content` holds can be given back as it is. cache_control has no effect: the
    prefix cache needs no hints.
    """

    type: str
    text: str | None = None
    citations: list[Any] | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list["InputBlock"] | None = None
    is_error: bool | None = None


class InputMessage(Struct, frozen=True):
    """One of `messages`. role: user, assistant or system."""

    role: str
    content: str | list[InputBlock]


class MessagesTool(Struct, frozen=True, kw_only=True):
    """One of `tools`; only those that the client runs are known. input_schema: a JSON schema."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None
    eager_input_streaming: bool | None = None


class MessagesToolChoice(Struct, frozen=True, kw_only=True):
    """`tool_choice`. type: auto, any, tool (with name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """`thinking`. type: adaptive (the model decides) or disabled."""

    type: str
    display: str | None = None


class OutputFormat(Struct, frozen=True):
    """`output_config.format`. type: json_schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessageMetadata(Struct, frozen=True):
    """`metadata`. It has no effect."""

    user_id: str | None = None


class MessagesRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/messages; /v1/messages/count_tokens takes it without max_tokens."""

    messages: Annotated[
        list[InputMessage],
        doc(
            "The conversation; a last message of the assistant is gone on with.",
            error="empty, or a block of an unknown kind",
        ),
    ]
    max_tokens: Annotated[
        int | None,
        doc(
            "Most tokens of the answer, thinking included.",
            default="required, but to count tokens",
            error="missing, below 1, or more than the context has",
        ),
    ] = None
    system: Annotated[str | list[InputBlock] | None, doc("The system message.", default="none")] = (
        None
    )
    stop_sequences: Annotated[
        list[str] | None,
        doc(
            "Strings that end the text and are cut off.",
            default="none",
            error="over 16 strings, an empty one, or one over 1024 characters",
        ),
    ] = None
    tools: Annotated[
        list[MessagesTool] | None,
        doc(
            "Tools that the model may use.",
            default="none",
            error="a tool that the client does not run itself",
        ),
    ] = None
    tool_choice: Annotated[
        MessagesToolChoice | None,
        doc(
            "auto, any, tool or none.",
            default="auto",
            error="without tools, a tool that is not among them, or any or tool together with "
            "output_config.format",
        ),
    ] = None
    thinking: Annotated[
        Thinking | None,
        doc("adaptive or disabled.", default="adaptive", error="enabled, with its budget"),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        doc(
            "effort: how much the model thinks; format: a JSON schema that the text matches.",
            default="none",
            error="an invalid schema",
        ),
    ] = None
    metadata: Annotated[MessageMetadata | None, doc("Whom the request is for; has no effect.")] = (
        None
    )
    cache_control: Annotated[
        dict[str, Any] | None, doc("Has no effect: the prefix cache needs no hints.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("More variables for the chat template.", default="none")
    ] = None


decode_messages_request = BodyDecoder(MessagesRequest, UNSUPPORTED_IN_MESSAGES)


# --- the answer ----------------------------------------------------------------------------------


class TextBlock(Struct, frozen=True, tag="text"):
    """What the model says."""

    text: str
    citations: None = None


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """What the model thinks before it speaks; it is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    """A tool that the client is to use. input: an object."""

    id: str
    name: str
    input: msgspec.Raw


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """input_tokens: the tokens of the prompt that had to be computed; those that the prefix cache
    held are in cache_read_input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: Literal["standard"] = "standard"


class Message(Struct, frozen=True, kw_only=True):
    """The model's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorDetail(Struct, frozen=True):
    """param: the path of the field at fault, as in the other routes' errors."""

    type: str
    message: str
    param: str | None = None


class AnthropicError(Struct, frozen=True, kw_only=True):
    """Anthropic's form of an error."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


# --- the events of a stream ----------------------------------------------------------------------


class MessageStart(Struct, frozen=True, tag="message_start"):
    """First of all events; the message is empty still."""

    message: Message


class Ping(Struct, frozen=True, tag="ping"):
    """Means nothing."""


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """A block begins; it is empty still."""

    index: int
    content_block: OutputBlock


class TextDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, frozen=True, tag="input_json_delta"):
    """More of the JSON of a tool's input."""

    partial_json: str


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    """How the message ended. The counts are totals."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """The last event of a message that ended well."""


class ErrorEvent(Struct, frozen=True, tag="error"):
    """The last event of a message that broke off."""

    error: AnthropicErrorDetail


MessageEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | ErrorEvent
)
