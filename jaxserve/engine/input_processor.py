"""Checks a prompt and its options against every limit and builds the engine core's requests."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import EngineConfig
from jaxserve.errors import RequestError
from jaxserve.messages import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
    EngineCoreRequest,
)
from jaxserve.messages import SamplingParams as CoreSamplingParams
from jaxserve.sampling_params import SamplingParams, shorten

COMPLETION_MAX_TOKENS = 16
_SEED_MASK = 2**64 - 1


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate: what the engine core gets, and what stays here.

    index: which choice of the client's request it is.
    final_only: the text is wanted when it is complete, not in pieces.
    prompt_only: the output is not wanted at all; the engine core makes one token all the same.
    """

    core: EngineCoreRequest
    index: int
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    final_only: bool = False
    prompt_only: bool = False


class InputProcessor:
    """Makes sequence requests; needs a resolved config, and the tokenizer for `bad_words`.

    client_idx: which API server it works for; ids differ from those that others give.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, client_idx: int = 0):
        self._tokenizer = tokenizer
        self._max_model_len = config.model.max_model_len
        self._max_logprobs = config.model.max_logprobs
        self._num_processor_args = dict(config.model.logits_processors or ())
        self._vocab_size = config.info.vocab_size
        self._eos_token_ids = config.info.eos_token_ids
        self._is_priority_policy = config.scheduler.scheduling_policy == "priority"
        seed = config.model.seed
        self._random = random.Random(seed + client_idx) if seed else random.SystemRandom()
        self._client_idx = client_idx
        prefix = f"{client_idx:x}-" if client_idx else ""
        self._ids = (f"{prefix}{i:x}" for i in itertools.count(1))

    def process(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time_s: float,
        default_max_tokens: int | None = None,
        first_index: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
        echo: bool = False,
        prompt_param: str = "prompt",
    ) -> list[SequenceRequest]:
        """One sequence for each of `params.n` choices of a prompt.

        Args:
          default_max_tokens: used when `params` has none; None is the rest of the context.
          first_index: index of the first choice.
          echo: the client gets the prompt back, so max_tokens may be 0.
          prompt_param: path of the prompt in the client's body, for errors.

        Raises:
          RequestError: a limit is broken; `param` names the field.
        """
        prompt_token_ids = self.truncate(prompt_token_ids, params, default_max_tokens)
        self._check_prompt(prompt_token_ids, prompt_param)
        self._check_priority(priority)
        prompt_only = params.max_tokens == 0
        if prompt_only and not echo and params.prompt_logprobs is None:
            raise RequestError(
                "max_tokens must be at least 1, got 0, unless the prompt or its "
                "log-probabilities are wanted back.",
                param="max_tokens",
            )
        sampling = self._resolve(params, len(prompt_token_ids), default_max_tokens)
        return [
            SequenceRequest(
                core=EngineCoreRequest(
                    request_id=next(self._ids),
                    prompt_token_ids=prompt_token_ids,
                    sampling=choice,
                    arrival_time_s=arrival_time_s,
                    priority=priority,
                    cache_salt=cache_salt,
                    client_idx=self._client_idx,
                    grammar=params.grammar,
                ),
                index=first_index + i,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                final_only=final_only,
                prompt_only=prompt_only,
            )
            for i, choice in enumerate(_with_seeds(sampling, params.n))
        ]

    def process_pooling(
        self,
        prompt_token_ids: list[int],
        pooling: Literal["last", "mean", "cls"],
        *,
        arrival_time_s: float,
        index: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_param: str = "input",
    ) -> SequenceRequest:
        """The sequence whose only output has the prompt's vector.

        Raises:
          RequestError: a limit is broken; `param` names the field.
        """
        self._check_prompt(prompt_token_ids, prompt_param)
        self._check_priority(priority)
        return SequenceRequest(
            core=EngineCoreRequest(
                request_id=next(self._ids),
                prompt_token_ids=prompt_token_ids,
                sampling=CoreSamplingParams(max_tokens=1, temperature=0.0, pooling=pooling),
                arrival_time_s=arrival_time_s,
                priority=priority,
                cache_salt=cache_salt,
                client_idx=self._client_idx,
            ),
            index=index,
            final_only=True,
            prompt_only=True,
        )

    def truncate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        default_max_tokens: int | None = None,
    ) -> list[int]:
        """The tokens of a prompt that `truncate_prompt_tokens` leaves."""
        limit = params.truncate_prompt_tokens
        if limit is None:
            return prompt_token_ids
        if limit == -1:
            wanted = default_max_tokens if params.max_tokens is None else params.max_tokens
            limit = max(1, self._max_model_len - max(1, wanted or 1))
        is_left = params.truncation_side == "left"
        return prompt_token_ids[-limit:] if is_left else prompt_token_ids[:limit]

    def _check_priority(self, priority: int) -> None:
        if priority and not self._is_priority_policy:
            raise RequestError(
                "priority needs a server started with --scheduling-policy priority.",
                param="priority",
            )

    def _check_prompt(self, token_ids: list[int], param: str) -> None:
        if not token_ids:
            raise RequestError("The prompt has no tokens.", param=param)
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"The prompt has {len(token_ids)} tokens; this model takes at most "
                f"{self._max_model_len} tokens, prompt and output together.",
                param=param,
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            position = next(i for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
            raise RequestError(
                f"Token id {shorten(token_ids[position])} is not in the vocabulary of "
                f"{self._vocab_size} tokens.",
                param=f"{param}[{position}]",
            )

    def _resolve(
        self, params: SamplingParams, num_prompt_tokens: int, default_max_tokens: int | None
    ) -> CoreSamplingParams:
        max_tokens = self._max_tokens(params, num_prompt_tokens, default_max_tokens)
        # The smallest set of tokens with any probability mass is the most probable token.
        top_k, top_p = (params.top_k, params.top_p) if params.top_p > 0 else (1, 1.0)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        logprobs = 0 if params.logprob_token_ids else params.logprobs
        return CoreSamplingParams(
            max_tokens=max_tokens,
            temperature=float(params.temperature),
            top_k=0 if top_k >= self._vocab_size else max(top_k, 0),
            top_p=float(top_p),
            min_p=float(params.min_p),
            seed=seed & _SEED_MASK,
            min_tokens=params.min_tokens,
            stop_token_ids=self._stop_token_ids(params.stop_token_ids, params.ignore_eos),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=self._logit_bias(params.logit_bias),
            allowed_token_ids=self._known_ids("allowed_token_ids", params.allowed_token_ids),
            bad_words=self._bad_words(params.bad_words),
            logits_processors=self._installed(params.processors),
            logprobs=self._num_logprobs("logprobs", logprobs),
            logprob_token_ids=self._known_ids("logprob_token_ids", params.logprob_token_ids) or (),
            prompt_logprobs=self._num_logprobs("prompt_logprobs", params.prompt_logprobs),
        )

    def _max_tokens(
        self, params: SamplingParams, num_prompt_tokens: int, default_max_tokens: int | None
    ) -> int:
        room = self._max_model_len - num_prompt_tokens
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = min(room, default_max_tokens or room)
            if params.min_tokens > max_tokens:
                raise RequestError(
                    f"min_tokens ({params.min_tokens}) is larger than the {max_tokens} tokens "
                    "that max_tokens allows by default.",
                    param="min_tokens",
                )
        elif max_tokens > room:
            raise RequestError(
                f"This model takes at most {self._max_model_len} tokens, prompt and output "
                f"together: the prompt has {num_prompt_tokens}, so max_tokens can be at most "
                f"{room}, not {max_tokens}.",
                param="max_tokens",
            )
        return max(1, max_tokens)

    def _stop_token_ids(self, wanted: Sequence[int], ignore_eos: bool) -> tuple[int, ...]:
        wanted = self._known_ids("stop_token_ids", wanted) or ()
        eos = () if ignore_eos else self._eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos, *wanted)))
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes up to {MAX_STOP_TOKEN_IDS - len(eos)} ids beside the "
                f"model's own {len(eos)}.",
                param="stop_token_ids",
            )
        return stop_token_ids

    def _known_ids(self, name: str, token_ids: Sequence[int] | None) -> tuple[int, ...] | None:
        """Each id once, in the order given."""
        if token_ids is None:
            return None
        if max(token_ids, default=0) >= self._vocab_size:
            i = next(i for i, t in enumerate(token_ids) if t >= self._vocab_size)
            raise self._unknown(token_ids[i], f"{name}[{i}]")
        return tuple(dict.fromkeys(token_ids))

    def _unknown(self, token_id: int, param: str) -> RequestError:
        return RequestError(
            f"Token id {token_id} is not in the vocabulary of {self._vocab_size} tokens.",
            param=param,
        )

    def _logit_bias(self, bias: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
        for token_id in bias or ():
            if token_id >= self._vocab_size:
                raise self._unknown(token_id, f"logit_bias.{token_id}")
        return tuple((token_id, float(value)) for token_id, value in (bias or {}).items())

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write the words, at the start of a text and behind a space.

        One that ends with another, as " x" in two tokens ends with "x", is left to the other.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for i, word in enumerate(words):
            bare = word.lstrip()
            first, second = (
                tuple(self._tokenizer.encode(prefix + bare, add_special_tokens=False))
                for prefix in ("", " ")
            )
            forms = (first,) if second[-len(first) :] == first else (first, second)
            longest = max(len(form) for form in forms)
            if longest > MAX_BAD_WORD_LEN:
                raise RequestError(
                    f"bad_words[{i}] has {longest} tokens; at most {MAX_BAD_WORD_LEN} are "
                    "supported.",
                    param=f"bad_words[{i}]",
                )
            sequences |= dict.fromkeys(forms)
        if len(sequences) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words are {len(sequences)} token sequences (a word can be several); at most "
                f"{MAX_BAD_WORDS} are supported.",
                param="bad_words",
            )
        return tuple(sequences)

    def _num_logprobs(self, name: str, wanted: int | None) -> int | None:
        """Checked against --max-logprobs, whose -1 is no limit."""
        if wanted is None or self._max_logprobs == -1:
            return wanted
        count = self._vocab_size if wanted == -1 else wanted
        if count > self._max_logprobs:
            raise RequestError(
                f"{name} can be at most {self._max_logprobs} (--max-logprobs), not {wanted}.",
                param=name,
            )
        return wanted

    def _installed(
        self, processors: tuple[tuple[str, tuple[float, ...]], ...]
    ) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """The same processors, each checked."""
        known = self._num_processor_args
        for i, (name, args) in enumerate(processors):
            param = f"logits_processors[{i}]"
            if name not in known:
                raise RequestError(
                    f"{param}: {name[:100]!r} is not installed here; there is "
                    f"{', '.join(sorted(known)) or 'none'}.",
                    param=param,
                )
            if len(args) != known[name]:
                raise RequestError(
                    f"{param}: {name} takes {known[name]} arguments, got {len(args)}.", param=param
                )
        return processors


def _with_seeds(sampling: CoreSamplingParams, n: int) -> Iterator[CoreSamplingParams]:
    yield sampling
    for i in range(1, n):
        yield msgspec.structs.replace(sampling, seed=(sampling.seed + i) & _SEED_MASK)
