"""POST /v1/completions: its body and its answer."""

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.common import GenerationRequest, Usage, doc
from jaxserve.server.protocol.decoding import BodyDecoder, unsupported_but
from jaxserve.server.protocol.logprobs import CompletionLogprobs, PromptLogprobs
from jaxserve.server.protocol.structured_output import ResponseFormatField, StructuredOutputsField

# Options of chats and of older or other APIs, which would do nothing here.
UNSUPPORTED_IN_COMPLETIONS: Final = unsupported_but(
    "echo",
    "prompt",
    "structured_outputs",
) | {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        doc(
            "A text, token ids, or a list of either.",
            error="empty, longer than the context, a mixture, or over 2048 prompts",
        ),
    ]
    echo: Annotated[
        bool | None,
        doc("The text begins with the prompt, and the log-probabilities with it.", default="false"),
    ] = None
    logprobs: Annotated[
        int | None,
        doc(
            "Log-probabilities of the tokens, and of that many likeliest in their place; -1 is the "
            "whole vocabulary.",
            default="none",
            error="below -1, or above --max-logprobs; -1 with echo",
        ),
    ] = None
    response_format: ResponseFormatField = None
    structured_outputs: StructuredOutputsField = None

    def sampling_params(self) -> SamplingParams:
        """With the log-probabilities, and those of an echoed prompt."""
        changes: dict[str, int] = {}
        if self.logprobs is not None:
            changes["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                if self.logprobs == -1:
                    raise RequestError(
                        "logprobs can be -1 (the whole vocabulary) only without echo.",
                        param="logprobs",
                    )
                changes["prompt_logprobs"] = self.logprobs
        params = super().sampling_params()
        return msgspec.structs.replace(params, **changes) if changes else params


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """A choice, or what it gained in one event of a stream.

    finish_reason: stop or length; null while it goes on.
    stop_reason: the stop string or the stop token id of the request that ended it.
    prompt_logprobs, prompt_token_ids, token_ids: as asked for, else left out.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


decode_completion_request = BodyDecoder(CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
