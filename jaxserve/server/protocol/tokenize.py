"""POST /tokenize and /detokenize: their bodies and answers."""

from typing import Annotated, Any

from msgspec import Struct

from jaxserve.server.protocol.chat import ChatMessage, Tool
from jaxserve.server.protocol.common import doc
from jaxserve.server.protocol.decoding import UNSUPPORTED_BY_ALL, BodyDecoder


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a prompt or messages; null is the same as leaving a field out."""

    model: Annotated[
        str | None, doc("Name of the served model.", default="it", error="another name (404)")
    ] = None
    prompt: Annotated[
        str | None, doc("A text.", default="messages are given", error="with messages")
    ] = None
    messages: Annotated[
        list[ChatMessage] | None,
        doc("A chat, as for /v1/chat/completions.", default="prompt is given", error="empty"),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc(
            "Put the tokenizer's special tokens (bos) around the text.",
            default="true; false for chats, whose template writes them",
        ),
    ] = None
    return_token_strs: Annotated[
        bool | None, doc("Give the vocabulary's spelling of each token too.", default="false")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        doc("A chat ends where the answer begins.", default="true", error="with a prompt"),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        doc("A chat ends within its last message.", default="false", error="with a prompt"),
    ] = None
    chat_template: Annotated[
        str | None,
        doc(
            "Used in place of the model's.",
            default="the model's",
            error="with a prompt, or without --trust-request-chat-template",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        doc("More variables for the template.", default="none", error="with a prompt"),
    ] = None
    tools: Annotated[
        list[Tool] | None, doc("Tools for the template.", default="none", error="with a prompt")
    ] = None


class Tokens(Struct, frozen=True):
    """The answer. token_strs: null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: Annotated[
        str | None, doc("Name of the served model.", default="it", error="another name (404)")
    ] = None
    tokens: Annotated[list[int], doc("Token ids.", error="not in the vocabulary")]


class DetokenizedText(Struct, frozen=True):
    """The answer: the text, with special tokens."""

    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """The answer of GET /tokenizer_info. chat_template: of chats without tools."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


decode_tokenize_request = BodyDecoder(TokenizeRequest, UNSUPPORTED_BY_ALL)
decode_detokenize_request = BodyDecoder(DetokenizeRequest, UNSUPPORTED_BY_ALL)
