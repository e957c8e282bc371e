"""Log-probabilities in answers, as chats and completions write them."""

from msgspec import Struct


class TopLogprob(Struct, frozen=True):
    """One of the tokens that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    """A token of a chat's answer.

    bytes: what the token really is; `token` has U+FFFD where they are a part of a character.
    top_logprobs: likeliest first; the token itself is not there unless it is among them.
    """

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """`choices[].logprobs` of a chat."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """`choices[].logprobs` of a completion: four lists with an entry a token.

    text_offset: characters of `text` (of the prompt too, with echo) before the token.
    token_logprobs: null for a prompt's first token, which nothing comes before.
    top_logprobs: the likeliest tokens, and the token itself.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True):
    """A token that is or could be at one place. rank: 1 for the likeliest; null if unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


type PromptLogprobs = list[dict[int, PromptLogprob] | None]
