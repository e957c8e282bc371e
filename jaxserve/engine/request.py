"""One request inside the engine core: its tokens, its progress, its place, its block hashes."""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
from llguidance import LLMatcher

from jaxserve.messages import EngineCoreRequest, FinishReason, SamplingParams, TokenLogprobs

HASH_BYTES = 16
NO_ROW = -1


class RequestStatus(enum.Enum):
    """Where a request is. PREEMPTED waits as WAITING does, but has run before."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """State of one sequence; written by the scheduler, the KV fields by the KVCacheManager.

    token_ids: prompt and the output known so far.
    num_planned_tokens: len(token_ids) plus the tokens that steps in flight will sample, plus
      forced_tokens.
    num_computed_tokens: tokens whose KV is computed once the steps planned so far have run.
    The scheduler closes the gap num_planned_tokens - num_computed_tokens.
    num_cached_tokens: prompt tokens the prefix cache gave at the first admission; -1 before it.

    Derived limits that keep the scheduler's loops short:
    max_total_tokens: prompt plus output may not exceed it; set by Scheduler.add_request.
    decode_until: while num_planned_tokens is below it, the next token needs neither a new block
      nor a look at the limit; 0 when not running.
    check_len: from this length on, update_from_output looks closer (first output, then the limit).

    grammar: what the output must match; the request is scheduled once it has a matcher.
    matcher, num_matched_tokens: written by StructuredOutputs; output tokens the matcher has seen.
    forced_tokens: tokens without a choice that follow the one in flight, and are known with it.

    prompt_logprobs: pieces for the first output; None when none are asked for, or sent.
    prompt_logprobs_since: the first step whose pieces count, those before were of a lost row.

    KV fields: block_ids, the block table; num_registered_blocks, how many of them, from the
    first, are in the prefix cache's hash map (or are equal to one that is).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival_time_s: float = 0.0
    priority: int = 0
    client_idx: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    queued_s: float = 0.0
    block_hashes: list[bytes] = field(default_factory=list)
    grammar: str | None = None

    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    row: int = NO_ROW
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_cached_tokens: int = -1
    order: tuple[int, float, int] = (0, 0.0, 0)
    stop_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0
    decode_until: int = 0
    check_len: int = 0
    matcher: LLMatcher | None = None
    num_matched_tokens: int = 0
    forced_tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_since: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_registered_blocks: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.num_prompt_tokens == len(self.token_ids), self
        self.num_planned_tokens = self.num_prompt_tokens
        self.check_len = self.num_prompt_tokens + 1
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @classmethod
    def from_message(
        cls, message: EngineCoreRequest, *, now_s: float, block_size: int, hash_blocks: bool
    ) -> "Request":
        """Copies the message's token list and hashes its full blocks (any thread may call).

        now_s: becomes queued_s.  hash_blocks: False when prefix caching is off.
        """
        tokens = message.prompt_token_ids
        salt, lora = message.cache_salt, message.lora_name
        return cls(
            request_id=message.request_id,
            token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            sampling=message.sampling,
            arrival_time_s=message.arrival_time_s,
            priority=message.priority,
            client_idx=message.client_idx,
            cache_salt=salt,
            lora_name=lora,
            queued_s=now_s,
            block_hashes=hash_prompt_blocks(tokens, block_size, salt, lora) if hash_blocks else [],
            grammar=message.grammar,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and known output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_extras(self) -> bool:
        """Whether workers send more of it than tokens."""
        sampling = self.sampling
        return (
            sampling.logprobs is not None
            or bool(sampling.logprob_token_ids)
            or sampling.prompt_logprobs is not None
            or bool(sampling.pooling)
        )

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether what is still to be sent depends on all the prompt's hidden states."""
        return self.prompt_logprobs is not None or bool(self.sampling.pooling)

    @property
    def num_in_flight(self) -> int:
        """Tokens that update_from_output has not brought yet: those that planned steps will sample,
        and forced ones."""
        return self.num_planned_tokens - len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.status.name} row={self.row} "
            f"tokens={self.num_prompt_tokens}+{self.num_output_tokens}+{self.num_in_flight} "
            f"computed={self.num_computed_tokens} blocks={len(self.block_ids)}>"
        )


def hash_prompt_blocks(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str | None = None,
    lora_name: str | None = None,
) -> list[bytes]:
    """The hash chain of the full blocks of `token_ids`; equal in every process.

    A block's hash commits to its own tokens (int32, little endian), to every block before it and,
    through the root of the chain, to the block size, the cache salt and the LoRA name. 128 bits of
    BLAKE2b: equal hashes mean equal KV contents.
    """
    root = _chain_root(block_size, cache_salt, lora_name)
    return _chain(root, token_ids, len(token_ids) // block_size, block_size)


def extend_block_hashes(request: Request, block_size: int, num_blocks: int) -> None:
    """Makes `request.block_hashes` cover the first `num_blocks` blocks, full of known tokens."""
    hashes = request.block_hashes
    num_new = num_blocks - len(hashes)
    if num_new <= 0:
        return
    assert num_blocks * block_size <= len(request.token_ids), (num_blocks, request)
    parent = (
        hashes[-1] if hashes else _chain_root(block_size, request.cache_salt, request.lora_name)
    )
    start = len(hashes) * block_size
    tokens = request.token_ids[start : num_blocks * block_size]
    hashes += _chain(parent, tokens, num_new, block_size)


def _chain_root(block_size: int, cache_salt: str | None, lora_name: str | None) -> bytes:
    keys = msgspec.msgpack.encode((block_size, cache_salt, lora_name))
    return blake2b(keys, digest_size=HASH_BYTES).digest()


def _chain(
    parent: bytes, token_ids: Sequence[int], num_blocks: int, block_size: int
) -> list[bytes]:
    num_tokens = num_blocks * block_size
    data = struct.pack(f"<{num_tokens}i", *token_ids[:num_tokens])
    block_bytes = 4 * block_size
    hashes = []
    for start in range(0, 4 * num_tokens, block_bytes):
        block = data[start : start + block_bytes]
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
