"""Checks a prompt and its options against every limit and builds the engine core's requests."""

import itertools
import random
from collections.abc import Iterator, Sequence

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.errors import RequestError
from jaxserve.messages import MAX_STOP_TOKEN_IDS, EngineCoreRequest
from jaxserve.messages import SamplingParams as CoreSamplingParams
from jaxserve.sampling_params import SamplingParams, shorten

COMPLETION_MAX_TOKENS = 16
_SEED_MASK = 2**64 - 1


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate: what the engine core gets, and what stays here.

    index: which choice of the client's request it is.
    final_only: the text is wanted when it is complete, not in pieces.
    """

    core: EngineCoreRequest
    index: int
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    final_only: bool = False


class InputProcessor:
    """Makes sequence requests; needs a resolved config."""

    def __init__(self, config: EngineConfig):
        self._max_model_len = config.model.max_model_len
        self._vocab_size = config.info.vocab_size
        self._eos_token_ids = config.info.eos_token_ids
        self._is_priority_policy = config.scheduler.scheduling_policy == "priority"
        seed = config.model.seed
        self._random = random.Random(seed) if seed else random.SystemRandom()
        self._ids = (f"{i:x}" for i in itertools.count(1))

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
        prompt_param: str = "prompt",
    ) -> list[SequenceRequest]:
        """One sequence for each of `params.n` choices of a prompt.

        Args:
          default_max_tokens: used when `params` has none; None is the rest of the context.
          first_index: index of the first choice.
          prompt_param: path of the prompt in the client's body, for errors.

        Raises:
          RequestError: a limit is broken; `param` names the field.
        """
        num_prompt_tokens = len(prompt_token_ids)
        self._check_prompt(prompt_token_ids, prompt_param)
        if priority and not self._is_priority_policy:
            raise RequestError(
                "priority needs a server started with --scheduling-policy priority.",
                param="priority",
            )
        sampling = self._resolve(params, num_prompt_tokens, default_max_tokens)
        return [
            SequenceRequest(
                core=EngineCoreRequest(
                    request_id=next(self._ids),
                    prompt_token_ids=prompt_token_ids,
                    sampling=choice,
                    arrival_time_s=arrival_time_s,
                    priority=priority,
                    cache_salt=cache_salt,
                ),
                index=first_index + i,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                final_only=final_only,
            )
            for i, choice in enumerate(_with_seeds(sampling, params.n))
        ]

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
        # The smallest set of tokens with any probability mass is the most probable token.
        top_k, top_p = (params.top_k, params.top_p) if params.top_p > 0 else (1, 1.0)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        return CoreSamplingParams(
            max_tokens=max_tokens,
            temperature=float(params.temperature),
            top_k=0 if top_k >= self._vocab_size else max(top_k, 0),
            top_p=float(top_p),
            min_p=float(params.min_p),
            seed=seed & _SEED_MASK,
            min_tokens=params.min_tokens,
            stop_token_ids=self._stop_token_ids(params.stop_token_ids, params.ignore_eos),
        )

    def _stop_token_ids(self, wanted: Sequence[int], ignore_eos: bool) -> tuple[int, ...]:
        for i, token_id in enumerate(wanted):
            if token_id >= self._vocab_size:
                raise RequestError(
                    f"Token id {token_id} is not in the vocabulary of {self._vocab_size} tokens.",
                    param=f"stop_token_ids[{i}]",
                )
        eos = () if ignore_eos else self._eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos, *wanted)))
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes up to {MAX_STOP_TOKEN_IDS - len(eos)} ids beside the "
                f"model's own {len(eos)}.",
                param="stop_token_ids",
            )
        return stop_token_ids


def _with_seeds(sampling: CoreSamplingParams, n: int) -> Iterator[CoreSamplingParams]:
    yield sampling
    for i in range(1, n):
        yield msgspec.structs.replace(sampling, seed=(sampling.seed + i) & _SEED_MASK)
