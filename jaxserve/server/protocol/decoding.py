"""From the bytes of a body to a request, and from what is wrong with them to a 400 that says so."""

import re
from typing import Any

import msgspec
from msgspec import UNSET

from jaxserve.errors import RequestError
from jaxserve.server.protocol.common import GenerationRequest

_REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
_ERROR_PATH_PATTERN = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
_MISSING_FIELD_PATTERN = re.compile(r"missing required field `(\w+)`")

# Options that no route has, with the values that ask for nothing; null is one always.
UNSUPPORTED_BY_ALL: dict[str, tuple[Any, ...]] = {
    "custom_logit_processor": (),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "early_stopping": (False,),
    "ebnf": ("",),
    "ec_transfer_params": (),
    "enable_thinking": (),
    "extra_args": ({},),
    "grammar": ("",),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "lora_path": (),
    "max_new_tokens": (),
    "media_io_kwargs": ({},),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "random_seed": (),
    "regex": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stop_regex": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "tfs_z": (1,),
    "thinking_token_budget": (-1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "xtc_probability": (0,),
}
# Options of some generating routes, refused by the others, where they would do nothing.
OPTIONS_OF_SOME: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (),
    "background": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include": ([],),
    "include_reasoning": (True,),
    "input": (),
    "instructions": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "messages": (),
    "output_config": ({},),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "stop_sequences": ([],),
    "store": (False,),
    "structured_outputs": ({},),
    "system": (),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": (),
}
# Options of generating routes, refused by those that generate nothing.
OPTIONS_OF_GENERATION: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "max_tokens": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "seed": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "stream": (False,),
    "stream_options": (),
    "temperature": (1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "top_p": (1,),
    "verbosity": (),
    "web_search_options": (),
}
# What to use in place of an option of older versions or other servers.
_REPLACED_BY = {
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "json_schema": "structured_outputs.json",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "normalized": "normalize",
    "output_dimension": "dimensions",
    "random_seed": "seed",
    "reasoning": "reasoning_effort",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "structured_outputs": "output_config.format",
    "text": "response_format",
    "truncate": "truncate_prompt_tokens",
    "truncation_direction": "truncation_side",
}


def unsupported_but(*own: str) -> dict[str, tuple[Any, ...]]:
    """What a generating route refuses: all but those options of some that are its own."""
    return UNSUPPORTED_BY_ALL | {
        name: neutral for name, neutral in OPTIONS_OF_SOME.items() if name not in own
    }


class BodyDecoder[T: msgspec.Struct]:
    """Decodes one kind of body, and refuses what is known but not implemented.

    unsupported: by name, the values that ask for nothing.
    """

    def __init__(self, kind: type[T], unsupported: dict[str, tuple[Any, ...]]):
        self._decoder = msgspec.json.Decoder(kind)
        self.kind = kind
        self.unsupported = unsupported
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
        for name, neutral in self.unsupported.items():
            value = getattr(others, name)
            if value is not UNSET and value is not None:
                self._check_neutral(name, value, neutral)
        if isinstance(request, GenerationRequest):
            _check_stream(request)
        _check_labels(request)
        return request

    def _check_neutral(self, name: str, value: Any, neutral: tuple[Any, ...]) -> None:
        for allowed in neutral:
            # 0 and False are equal in Python, but not in JSON.
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return
        instead = _REPLACED_BY.get(name, "")
        field = instead.partition(".")[0]
        if field in self.kind.__struct_fields__ and field not in self.unsupported:
            what = f"Use {instead}."
        else:
            hint = f", or set it to {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
            what = f"Leave it out{hint}."
        raise RequestError(
            f"{name} is not supported by this version of jaxserve. {what}", param=name
        )


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


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream: true.", param="stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available in a stream.", param="prompt_logprobs")


def _check_labels(request: msgspec.Struct) -> None:
    """What a request of any kind may carry for the server's own use."""
    request_id = getattr(request, "request_id", None)
    if request_id is not None and not _REQUEST_ID_PATTERN.fullmatch(request_id):
        raise RequestError(
            "request_id must be 1 to 128 visible ASCII characters.", param="request_id"
        )
    if getattr(request, "cache_salt", None) == "":
        raise RequestError("cache_salt must not be empty.", param="cache_salt")
    priority = getattr(request, "priority", None)
    if priority is not None and abs(priority) >= 2**31:
        raise RequestError("priority must fit into 32 bits.", param="priority")
