"""What several routes share: generation options, usage, errors, models."""

from msgspec import Struct

from jaxserve.sampling_params import SamplingParams


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

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError when a value is out of range."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return SamplingParams(**{k: v for k, v in given.items() if v is not None})


_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.__struct_fields__
)


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


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
