"""POST /v1/embeddings: its body and its answer."""

from typing import Annotated, Final, Literal

from msgspec import Struct

from jaxserve.server.protocol.common import (
    CacheSalt,
    Priority,
    RequestId,
    TruncationSide,
    User,
    doc,
)
from jaxserve.server.protocol.decoding import (
    OPTIONS_OF_GENERATION,
    BodyDecoder,
    unsupported_but,
)

# Options of generation, and of embeddings elsewhere.
UNSUPPORTED_IN_EMBEDDINGS: Final = (
    unsupported_but("input")
    | OPTIONS_OF_GENERATION
    | {
        "embed_dtype": ("float32",),
        "embedding_type": ("float",),
        "embedding_types": (["float"],),
        "endianness": ("native", "little"),
        "input_type": (),
        "late_chunking": (False,),
        "normalized": (),
        "output_dimension": (),
        "output_dtype": ("float",),
        "padding": ("do_not_pad",),
        "prompt_name": (),
        "task": ("embed",),
        "truncate": (False, "NONE"),
        "truncation": (False,),
        "truncation_direction": (),
    }
)


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings; null is the same as leaving a field out."""

    model: Annotated[str, doc("Name of the served model.", error="another name (404)")]
    input: Annotated[
        str | list[str | int | list[int]],
        doc(
            "A text, token ids, or a list of either; each gets a vector.",
            error="empty, as long as the context or longer, a mixture, or over 2048 inputs",
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        doc("Numbers, or base64 of little-endian float32.", default="float"),
    ] = None
    dimensions: Annotated[
        int | None,
        doc(
            "Only that many first numbers of each vector, before it is normalized.",
            default="all",
            error="below 1, or more than the model's hidden size",
        ),
    ] = None
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None,
        doc(
            "Made of the hidden state of the last token, of the first (cls), or of their mean.",
            default="--pooling",
        ),
    ] = None
    normalize: Annotated[
        bool | None, doc("Vectors have length 1. vLLM's name is use_activation.", default="true")
    ] = None
    use_activation: Annotated[
        bool | None, doc("The same as normalize.", default="true", error="differs from normalize")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Put the tokenizer's special tokens (bos) around a text.", default="true")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        doc(
            "Longest input; the rest is cut off. -1 is the most that the model takes.",
            default="an input that is too long is a 400",
            error="0, or below -1",
        ),
    ] = None
    truncation_side: TruncationSide = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    user: User = None


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers or base64, as asked for."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True):
    """How many tokens the inputs have."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """The whole answer, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


decode_embedding_request = BodyDecoder(EmbeddingRequest, UNSUPPORTED_IN_EMBEDDINGS)
