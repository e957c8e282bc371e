"""What a user may ask of sampling, and the one place that checks the ranges."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxserve.errors import RequestError
from jaxserve.messages import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PROCESSOR_ARGS,
)

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 1024
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1000.0
MAX_BIAS = 100.0
MAX_BAD_WORD_CHARS = 256
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1
_INT32_MAX = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt is continued; OpenAI's and vLLM's names, checked when it is made.

    n: how many choices; choice i is sampled with seed + i.
    temperature: 0 is greedy.  top_k: 0 or -1 is off.  top_p: 1 is off.  min_p: 0 is off.
    seed: None is random.
    max_tokens: None is 16 for plain prompts and the rest of the context for chats. 0 is for those
        who want the prompt back (its log-probabilities, or an echo) and nothing else.
    min_tokens: neither stop tokens nor stop strings end the text before this many tokens.
    stop: up to 16 strings that end the text; kept in it with include_stop_str_in_output.
    stop_token_ids: token ids that end the text, besides the model's own (see ignore_eos).
    presence_penalty, frequency_penalty: -2 to 2, of tokens that the output has; 0 is off.
    repetition_penalty: above 0, of tokens that prompt or output have; 1 is off.
    logit_bias: what is added to a token's logit, -100 to 100, by token id.
    allowed_token_ids: nothing else is sampled; None is everything.
    bad_words: texts that the output does not get, at its start or within it.
    logits_processors: up to 8 names of installed processors, or (name, its numbers) pairs.
    logprobs: how many of the likeliest tokens are reported with each output token and its own
        log-probability; None is none at all, -1 is the whole vocabulary.
    logprob_token_ids: tokens whose log-probabilities are reported with each output token, in place
        of the likeliest.
    prompt_logprobs: as logprobs, for the prompt's tokens; never -1.
    truncate_prompt_tokens: at most that many tokens of the prompt are used, -1 is as many as the
        context holds beside max_tokens; truncation_side is where tokens are cut off.
    skip_special_tokens: the text has no special tokens.
    spaces_between_special_tokens: False takes out the spaces that some vocabularies (not byte-level
        ones) put between two special tokens.
    grammar: what the output must match, in llguidance's JSON (`jaxserve.grammars` makes it).

    Raises:
      RequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[str | tuple[str, Sequence[float]]] = ()
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    grammar: str | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, _INT32_MAX)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, _SEED_MIN, _SEED_MAX)
        self._check_lengths()
        _check_stop(self.stop)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false.", param=name)
        self._check_logits_options()
        self._check_logprobs()
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise RequestError("grammar must be a string.", param="grammar")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, _INT32_MAX)
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, _INT32_MAX)
            if self.truncate_prompt_tokens == 0:
                raise RequestError(
                    "truncate_prompt_tokens must be -1 or at least 1, got 0.",
                    param="truncate_prompt_tokens",
                )
        if self.truncation_side not in ("left", "right"):
            raise RequestError(
                f"truncation_side must be left or right, got {self.truncation_side!r}.",
                param="truncation_side",
            )

    def _check_logits_options(self) -> None:
        _check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be above 0.", param="repetition_penalty")
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids must not be empty: nothing could be sampled.",
                    param="allowed_token_ids",
                )
        _check_bad_words(self.bad_words)
        _check_list("logits_processors", self.logits_processors)
        if len(self.logits_processors) > MAX_LOGITS_PROCESSORS:
            raise RequestError(
                f"logits_processors takes up to {MAX_LOGITS_PROCESSORS}, got "
                f"{len(self.logits_processors)}.",
                param="logits_processors",
            )
        for i, processor in enumerate(self.logits_processors):
            _check_processor(f"logits_processors[{i}]", processor)

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, -1, _INT32_MAX)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, _INT32_MAX)
        _check_token_ids("logprob_token_ids", self.logprob_token_ids)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"logprob_token_ids takes up to {MAX_LOGPROB_TOKEN_IDS} ids, got "
                f"{len(self.logprob_token_ids)}.",
                param="logprob_token_ids",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def processors(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """`logits_processors` as (name, arguments), whichever way they were given."""
        return tuple(
            (processor, ())
            if isinstance(processor, str)
            else (processor[0], tuple(float(arg) for arg in processor[1]))
            for processor in self.logits_processors
        )


_BOOLEANS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {value!r}.", param=name)
    if not low <= value <= high:
        raise RequestError(_range_text(name, value, low, high), param=name)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, got {value!r}.", param=name)
    if not low <= value <= high:  # NaN is in no range
        raise RequestError(_range_text(name, value, low, high), param=name)


def _check_list(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, got {value!r}.", param=name)


def _check_token_ids(name: str, token_ids: Sequence[int]) -> None:
    _check_list(name, token_ids)
    # There can be as many as a body holds: those that are right must not take long.
    if {*map(type, token_ids)} == {int} and min(token_ids) >= 0 and max(token_ids) <= _INT32_MAX:
        return
    for i, token_id in enumerate(token_ids):
        _check_int(f"{name}[{i}]", token_id, 0, _INT32_MAX)


def _range_text(name: str, value: float, low: float, high: float) -> str:
    if high == _INT32_MAX:
        bound = f"at least {low}" if value < low else f"at most {high}"
        return f"{name} must be {bound}, got {shorten(value)}."
    return f"{name} must be between {low} and {high}, got {shorten(value)}."


def shorten(value: object) -> str:
    """`value` for an error message; a client's integer may have thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number too large" if value > 0 else "a number too small"
    return repr(value)


def _check_stop(stop: str | Sequence[str]) -> None:
    strings = (stop,) if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop takes up to {MAX_STOP_STRINGS} strings, got {len(strings)}.", param="stop"
        )
    for i, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{i}]"
        _check_text(param, text, MAX_STOP_STRING_LEN)


def _check_bad_words(words: Sequence[str]) -> None:
    _check_list("bad_words", words)
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words takes up to {MAX_BAD_WORDS} words, got {len(words)}.", param="bad_words"
        )
    for i, word in enumerate(words):
        _check_text(f"bad_words[{i}]", word, MAX_BAD_WORD_CHARS)
        if word.isspace():
            raise RequestError(f"bad_words[{i}] is only spaces.", param=f"bad_words[{i}]")


def _check_text(param: str, text: object, max_len: int) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{param} must be a string, got {text!r}.", param=param)
    if not text:
        raise RequestError(f"{param} must not be empty.", param=param)
    if len(text) > max_len:
        raise RequestError(
            f"{param} must be at most {max_len} characters, got {len(text)}.", param=param
        )


def _check_logit_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):
        raise RequestError("logit_bias must map token ids to numbers.", param="logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias takes up to {MAX_LOGIT_BIAS} tokens, got {len(bias)}.", param="logit_bias"
        )
    for token_id, value in bias.items():
        param = f"logit_bias.{shorten(token_id)}"
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestError(f"{param}: a token id must be an integer.", param="logit_bias")
        if not 0 <= token_id <= _INT32_MAX:
            raise RequestError(
                f"logit_bias: token id {shorten(token_id)} is out of range.", param="logit_bias"
            )
        _check_number(param, value, -MAX_BIAS, MAX_BIAS)


def _check_processor(param: str, processor: Any) -> None:
    if isinstance(processor, str):
        return
    if not isinstance(processor, Sequence) or len(processor) != 2:
        raise RequestError(f"{param} must be a name, or a name and its arguments.", param=param)
    name, args = processor
    if not isinstance(name, str):
        raise RequestError(f"{param} must have a name, got {name!r}.", param=param)
    if len(args) > MAX_PROCESSOR_ARGS:
        raise RequestError(
            f"{param} takes up to {MAX_PROCESSOR_ARGS} arguments, got {len(args)}.", param=param
        )
    for i, arg in enumerate(args):
        _check_number(f"{param}.args[{i}]", arg, -3e38, 3e38)
