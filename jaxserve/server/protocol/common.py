"""What several routes share: generation options, usage, errors, models."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams


def doc(description: str, *, default: str = "", error: str = "") -> Meta:
    """A field's text for docs/api.md and /openapi.json.

    default: what leaving it out means.  error: when it is a 400, beside a wrong type.
    """
    return Meta(description=description, extra={"default": default, "error": error})


# Fields that several bodies have.
TruncationSide = Annotated[
    Literal["left", "right"] | None,
    doc("Which end truncate_prompt_tokens cuts off.", default="left"),
]
Priority = Annotated[
    int | None,
    doc(
        "Lower runs first.",
        default="0",
        error="not 0 without --scheduling-policy priority, or over 32 bits",
    ),
]
CacheSalt = Annotated[
    str | None,
    doc(
        "Prefix cache entries are shared only between requests with the same salt.",
        default="shared by all",
        error="empty",
    ),
]
RequestId = Annotated[
    str | None,
    doc(
        "Names the request in the response's id.",
        default="random",
        error="not 1 to 128 visible ASCII characters",
    ),
]
User = Annotated[str | None, doc("Whom the request is for; has no effect.")]


class StreamOptions(Struct, frozen=True):
    """`stream_options`."""

    include_usage: Annotated[
        bool | None, doc("One more chunk at the end has the usage.", default="false")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, doc("Every chunk has the usage of its choice so far.", default="false")
    ] = None


class LogitsProcessorReference(Struct, frozen=True, kw_only=True):
    """One of `logits_processors`, with arguments."""

    qualname: Annotated[str, doc("Name of an entry point in the group jaxserve.logits_processors.")]
    args: Annotated[
        list[float] | None,
        doc("Numbers, as many as it takes.", default="none", error="more or fewer"),
    ] = None
    kwargs: Annotated[
        dict[str, Any] | None, doc("Not taken.", default="none", error="not empty")
    ] = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """The options that chats and completions share; null is the same as leaving a field out."""

    model: Annotated[str, doc("Name of the served model.", error="another name (404)")]
    n: Annotated[
        int | None,
        doc(
            "How many choices; choice i is sampled with seed + i.",
            default="1",
            error="outside 1 to 128, or over 2048 choices for all prompts together",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        doc("Logits are divided by it; 0 is greedy.", default="1", error="outside 0 to 100"),
    ] = None
    top_p: Annotated[
        float | None,
        doc(
            "Only the likeliest tokens that together have this probability; 0 is the likeliest.",
            default="1",
            error="outside 0 to 1",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        doc(
            "Only that many likeliest tokens; 0 and -1 are off.",
            default="0",
            error="outside -1 to 2^31 - 1",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        doc(
            "Only tokens at least this fraction as likely as the likeliest.",
            default="0",
            error="outside 0 to 1",
        ),
    ] = None
    seed: Annotated[
        int | None,
        doc(
            "The same seed gives the same tokens, whatever else runs.",
            default="random",
            error="outside -2^63 to 2^64 - 1",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        doc(
            "Most tokens of a choice.",
            default="16 for completions, else the rest of the context",
            error="below 1 (0 is right with echo or prompt_logprobs), or more than the context has",
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        doc(
            "Nothing ends the text before that many tokens.",
            default="0",
            error="below 0, or above max_tokens",
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        doc(
            "Strings that end the text and are cut off.",
            default="none",
            error="over 16 strings, an empty one, or one over 1024 characters",
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        doc(
            "Tokens that end the text, beside the model's own.",
            default="none",
            error="not in the vocabulary, or over 32 with the model's own",
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None, doc("The model's own end tokens do not end the text.", default="false")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, doc("The text keeps what ended it.", default="false")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, doc("The text has no special tokens.", default="true")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        doc(
            "false takes out the space that some vocabularies put between two special tokens. "
            "Byte-level ones (GPT-2, Llama 3, Qwen) have no such space: nothing changes.",
            default="true",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        doc("Taken from the logits of tokens in the output.", default="0", error="outside -2 to 2"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        doc(
            "Taken from a token's logit once for each time the output has it.",
            default="0",
            error="outside -2 to 2",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        doc(
            "Divides positive and multiplies negative logits of tokens in prompt or output.",
            default="1",
            error="0 or less, or above 1000",
        ),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        doc(
            "Added to logits, by token id.",
            default="none",
            error="outside -100 to 100, a token not in the vocabulary, or over 1024 tokens",
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        doc(
            "Nothing else is sampled.",
            default="everything",
            error="empty, or a token not in the vocabulary",
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        doc(
            "Texts that the output never gets, at its start or behind a space.",
            default="none",
            error="empty, over 256 characters or 8 tokens, or over 128 token sequences in all",
        ),
    ] = None
    logits_processors: Annotated[
        list[str | LogitsProcessorReference] | None,
        doc(
            "Installed logits processors to apply, in this order: a name, or qualname and args.",
            default="none",
            error="not installed on the server, another number of arguments, or over 8",
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        doc(
            "Tokens whose log-probabilities come with each output token, in place of the likeliest "
            "ones.",
            default="none",
            error="a token not in the vocabulary, or over 128",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        doc(
            "Log-probabilities of the prompt's tokens, and of that many likeliest in their place.",
            default="none",
            error="below 0, above --max-logprobs, or with stream",
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        doc(
            "Longest prompt; the rest is cut off. -1 is what the context holds beside max_tokens.",
            default="a prompt that is too long is a 400",
            error="0, or below -1",
        ),
    ] = None
    truncation_side: TruncationSide = None
    return_token_ids: Annotated[
        bool | None,
        doc("The answer has prompt_token_ids and token_ids.", default="false"),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None,
        doc('Tokens in log-probabilities are written as "token_id:123".', default="false"),
    ] = None
    stream: Annotated[bool | None, doc("Answer as server-sent events.", default="false")] = None
    stream_options: Annotated[
        StreamOptions | None, doc("Usage in a stream.", default="none", error="without stream")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc(
            "Put the tokenizer's special tokens (bos) around a text.",
            default="true; false for chats, whose template writes them",
        ),
    ] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    user: User = None

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
        if self.logits_processors is not None:
            given["logits_processors"] = [
                _processor(f"logits_processors[{i}]", processor)
                for i, processor in enumerate(self.logits_processors)
            ]
        return SamplingParams(**{k: v for k, v in given.items() if v is not None})


_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.__struct_fields__
)


def _processor(
    path: str, processor: str | LogitsProcessorReference
) -> str | tuple[str, list[float]]:
    if isinstance(processor, str):
        return processor
    if processor.kwargs:
        raise RequestError(
            f"{path}.kwargs is not supported; give numbers in args.", param=f"{path}.kwargs"
        )
    return processor.qualname, processor.args or []


class PromptTokensDetails(Struct, frozen=True):
    """cached_tokens: taken from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """reasoning_tokens: of the reasoning before the answer."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """How many tokens a request took; prompts count once, whatever n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


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
