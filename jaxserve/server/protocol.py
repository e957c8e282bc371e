"""The bodies clients send and get: OpenAI's API and vLLM's extensions to it, as msgspec structs.

A field that is not known is allowed and has no effect. A field that is known but not implemented is
refused when its value would change the result (UNSUPPORTED).
"""

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams

_REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
_ERROR_PATH_PATTERN = re.compile(r" - at `(key in )?\$\.?(.*)`$")
_MISSING_FIELD_PATTERN = re.compile(r"missing required field `(\w+)`")

# Known options that are not implemented, with the values that ask for nothing; null is one always.
_UNSUPPORTED_BY_ALL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "ebnf": ("",),
    "extra_args": ({},),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_UNSUPPORTED_CHAT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# An option of one route is refused on the other, where it would do nothing.
UNSUPPORTED_IN_CHAT: Final = (
    _UNSUPPORTED_BY_ALL
    | _UNSUPPORTED_CHAT_OPTIONS
    | {"best_of": (1,), "logprobs": (False,), "prompt": ()}
)
UNSUPPORTED_IN_COMPLETIONS: Final = (
    _UNSUPPORTED_BY_ALL
    | _UNSUPPORTED_CHAT_OPTIONS
    | {
        "add_generation_prompt": (),
        "best_of": (1,),
        "chat_template_kwargs": ({},),
        "logprobs": (),
        "max_completion_tokens": (),
        "messages": (),
    }
)


class StreamOptions(Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """The options that chats and completions share; null is the same as leaving a field out."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError when a value is out of range."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return SamplingParams(**{k: v for k, v in given.items() if v is not None})


_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.__struct_fields__
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


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]


# --- responses -----------------------------------------------------------------------------------


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


# --- decoding ------------------------------------------------------------------------------------


class _BodyDecoder[T: GenerationRequest]:
    """Decodes one kind of body, and refuses what is known but not implemented."""

    def __init__(self, kind: type[T], unsupported: dict[str, tuple[Any, ...]]):
        self._decoder = msgspec.json.Decoder(kind)
        self._unsupported = unsupported
        self._unsupported_decoder = msgspec.json.Decoder(
            msgspec.defstruct(
                "Unsupported", [(name, Any, UNSET) for name in unsupported], frozen=True
            )
        )

    def __call__(self, body: bytes) -> T:
        try:
            request = self._decoder.decode(body)
            others = self._unsupported_decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _validation_error(error) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"The body is not JSON: {error}.") from error
        except RecursionError as error:
            raise RequestError("The body is nested too deeply.") from error
        for name, neutral in self._unsupported.items():
            value = getattr(others, name)
            if value is not UNSET and value is not None:
                _check_neutral(name, value, neutral)
        _check_options(request)
        return request


def _validation_error(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    path = _ERROR_PATH_PATTERN.search(text)
    param = path[2] if path else ""
    if path:
        text = text[: path.start()]
    if missing := _MISSING_FIELD_PATTERN.search(text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"{param} is missing.", param=param)
    message = text.replace("`", "'")
    return RequestError(f"{param}: {message}." if param else f"{message}.", param=param or None)


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    for allowed in neutral:
        # 0 and False are equal in Python, but not in JSON.
        if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
            return
    hint = f", or set it to {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
    raise RequestError(
        f"{name} is not supported by this version of jaxserve. Leave it out{hint}.", param=name
    )


def _check_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise RequestError(
                "stream_options is only allowed with stream: true.", param="stream_options"
            )
        if options.continuous_usage_stats:
            raise RequestError(
                "continuous_usage_stats is not supported by this version of jaxserve.",
                param="stream_options.continuous_usage_stats",
            )
    if request.request_id is not None and not _REQUEST_ID_PATTERN.fullmatch(request.request_id):
        raise RequestError(
            "request_id must be 1 to 128 visible ASCII characters.", param="request_id"
        )
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty.", param="cache_salt")
    if request.priority is not None and abs(request.priority) >= 2**31:
        raise RequestError("priority must fit into 32 bits.", param="priority")


decode_chat_request = _BodyDecoder(ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
decode_completion_request = _BodyDecoder(CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
