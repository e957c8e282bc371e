"""From the bytes of a body to a request, and from what is wrong with them to a 400 that says so."""

import re
from typing import Any

import msgspec
from msgspec import UNSET

from jaxserve.errors import RequestError
from jaxserve.server.protocol.common import GenerationRequest

_REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
_ERROR_PATH_PATTERN = re.compile(r" - at `(key in )?\$\.?(.*)`$")
_MISSING_FIELD_PATTERN = re.compile(r"missing required field `(\w+)`")

# Known options that are not implemented, with the values that ask for nothing; null is one always.
UNSUPPORTED_BY_ALL: dict[str, tuple[Any, ...]] = {
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
CHAT_OPTIONS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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


class BodyDecoder[T: GenerationRequest]:
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
