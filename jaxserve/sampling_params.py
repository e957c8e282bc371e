"""What a user may ask of sampling, and the one place that checks the ranges."""

from collections.abc import Sequence

import msgspec

from jaxserve.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 1024
MAX_TEMPERATURE = 100.0
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1
_INT32_MAX = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt is continued; OpenAI's names, checked when it is made.

    n: how many choices; choice i is sampled with seed + i.
    temperature: 0 is greedy.  top_k: 0 or -1 is off.  top_p: 1 is off.  min_p: 0 is off.
    seed: None is random.
    max_tokens: None is 16 for plain prompts and the rest of the context for chats.
    min_tokens: neither stop tokens nor stop strings end the text before this many tokens.
    stop: up to 16 strings that end the text; kept in it with include_stop_str_in_output.
    stop_token_ids: token ids that end the text, besides the model's own (see ignore_eos).

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

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, _INT32_MAX)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, _SEED_MIN, _SEED_MAX)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        _check_stop(self.stop)
        for i, token_id in enumerate(self.stop_token_ids):
            _check_int(f"stop_token_ids[{i}]", token_id, 0, _INT32_MAX)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false.", param=name)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


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


def _range_text(name: str, value: object, low: float, high: float) -> str:
    if high == _INT32_MAX:
        return f"{name} must be at least {low}, got {shorten(value)}."
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
        if not isinstance(text, str):
            raise RequestError(f"{param} must be a string, got {text!r}.", param=param)
        if not text:
            raise RequestError(f"{param} must not be empty.", param=param)
        if len(text) > MAX_STOP_STRING_LEN:
            raise RequestError(
                f"{param} must be at most {MAX_STOP_STRING_LEN} characters, got {len(text)}.",
                param=param,
            )
