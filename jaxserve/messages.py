"""Every message that crosses a process boundary.

    API server --EngineInput--> engine core --WorkerInput---> worker
    API server <-EngineOutput-- engine core <-WorkerOutput-- worker

Where there are several engine cores, a coordinator stands before them: it hands each request to one
of them, all else to all. API servers send each other PeerMessages. All are frozen, array-like
msgspec structs: new fields go at the end, with a default.
"""

import enum
from typing import Any, Literal

import msgspec

FLOAT_EPS = 1e-5
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LEN = 8
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGITS_PROCESSORS = 8
MAX_PROCESSOR_ARGS = 4


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2

    def __str__(self) -> str:
        return self.name.lower()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one sequence is sampled and when the engine ends it; every value is resolved.

    temperature: 0 is greedy (values below FLOAT_EPS count as 0).
    top_k: 0 is off.  top_p: 1 is off.  min_p: 0 is off.
    seed: 64 random bits; a token depends on (seed, its position), never on the batch.
    max_tokens: at least 1, already cut to the context length.
    min_tokens: stop token ids cannot be sampled before this many output tokens.
    stop_token_ids: the model's end-of-sequence ids (unless ignore_eos) and the request's own; at
        most MAX_STOP_TOKEN_IDS.
    presence_penalty, frequency_penalty: of the output so far; 0 is off.
    repetition_penalty: of prompt and output; 1 is off.
    logit_bias: (token id, what is added to its logit); at most MAX_LOGIT_BIAS pairs, ids differ.
    allowed_token_ids: nothing else can be sampled; None is everything.
    bad_words: token sequences that the output never completes; at most MAX_BAD_WORDS, each of 1 to
        MAX_BAD_WORD_LEN tokens.
    logits_processors: (name of an installed processor, its arguments), in order of application; at
        most MAX_LOGITS_PROCESSORS.
    logprobs: how many of the likeliest tokens are reported with each output token, whose own
        log-probability is reported too; None is none at all, -1 is the whole vocabulary.
        Log-probabilities are those of the model's own logits, before any option changes them.
    logprob_token_ids: tokens whose log-probabilities are reported with each output token; at most
        MAX_LOGPROB_TOKEN_IDS.
    prompt_logprobs: as logprobs, for the tokens of the prompt from the second; never -1.
    pooling: instead of text, one vector made of the prompt's hidden states: of the "last" token, of
        the first ("cls"), or their "mean". The token sampled beside it means nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[tuple[str, tuple[float, ...]], ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    pooling: Literal["", "last", "mean", "cls"] = ""

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change what is sampled next."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


# --- API server -> engine core -------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="request"):
    """One sequence to generate. The engine core never sees text.

    arrival_time_s: seconds since the epoch.  priority: lower runs first (policy "priority").
    cache_salt: isolates this request's prefix cache entries from requests with another salt.
    client_idx: which API server gets the outputs.
    grammar: what the output must match, as llguidance's JSON (a grammar list); None is anything.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time_s: float
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    client_idx: int = 0
    grammar: str | None = None


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The client no longer wants these requests; unknown ids are ignored."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, frozen=True, array_like=True, tag="utility"):
    """Run a named engine core method between two steps, such as `reset_prefix_cache`."""

    call_id: int
    method: str
    args: list[Any] = []
    client_idx: int = 0


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine core: abort what runs, end the workers, exit."""


EngineInput = EngineCoreRequest | AbortRequests | UtilityCall | Shutdown


# --- engine core -> API server -------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n tokens in a row, as little-endian arrays (`np.frombuffer`).

    logprobs: float32 [n], the tokens' own.  ranks: int32 [n], 1 for the likeliest token.
    top_ids, top_logprobs: int32 and float32 [n, num_top], likeliest first.
    chosen_logprobs: float32 [n, len(sampling.logprob_token_ids)], in the request's order.
    """

    num_tokens: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    chosen_logprobs: bytes = b""


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True):
    """One request's progress in one step.

    stop_reason: the stop token id that ended it, when finish_reason is STOP.
    num_cached_tokens: prompt tokens taken from the prefix cache.
    queued_s, scheduled_s: engine core clock (seconds since the epoch); set on the first output.
    logprobs: of new_token_ids, when the request asks for them.
    prompt_logprobs: with the first output, when the request asks for them: pieces that together
        cover the prompt from its second token.
    embedding: float32 [hidden_size], little-endian; with the only output of a pooling request.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    scheduled_s: float = 0.0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot for metrics; the counters are totals since the start.

    num_requests: sequences that have come, those included that wait for a grammar.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_used_kv_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_compiles_after_ready: int = 0
    num_requests: int = 0


class EngineCoreOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """Everything one step did for one API server. engine_idx: which engine core's step."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp_s: float
    engine_idx: int = 0


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Sent once, after warm-up. config: the resolved EngineConfig as msgpack."""

    config: bytes


class UtilityResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """Answer to a UtilityCall: a value, or an error text."""

    call_id: int
    value: Any = None
    error: str | None = None


class EngineDead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """The engine core's last message, or what the first process says when any other has died.

    fix: set when the failure is a UserError.
    """

    reason: str
    fix: str | None = None


# --- API server -> API server --------------------------------------------------------------------


class ApiServerReady(msgspec.Struct, frozen=True, array_like=True, tag="api_ready"):
    """To the first: this one is connected to everybody and could serve."""

    client_idx: int


class StartServing(msgspec.Struct, frozen=True, array_like=True, tag="serve"):
    """From the first: all are ready, and the port is ours."""


class MetricsRequest(msgspec.Struct, frozen=True, array_like=True, tag="metrics?"):
    """Asks for a MetricsReport with this call_id."""

    client_idx: int
    call_id: int


class MetricsReport(msgspec.Struct, frozen=True, array_like=True, tag="metrics"):
    """What one API server has counted. counts: a MetricsCounts as msgpack (`metrics.py`)."""

    call_id: int
    counts: bytes
    client_idx: int


EngineOutput = EngineCoreOutputs | EngineReady | UtilityResult | EngineDead
PeerMessage = ApiServerReady | StartServing | MetricsRequest | MetricsReport
PeerInput = PeerMessage | EngineDead


# --- engine core -> worker -----------------------------------------------------------------------


class AdmittedRow(msgspec.Struct, frozen=True, array_like=True):
    """All a worker needs of a request, sent when a row is first used (or used again after
    preemption).

    token_ids: prompt and, after a preemption, the output so far.
    num_prompt_tokens: how many of token_ids are the prompt.
    num_computed_tokens: how many of token_ids are in block_ids already (prefix cache).
    block_ids: the row's block table so far, the blocks of this step included.
    """

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One step's plan, as a difference to the step before.

    Order of application: released, admitted, forced_tokens, new_blocks, num_tokens.
    released_rows: rows whose request ended or was preempted.
    new_blocks: (row, block id) pairs, flat, in block table order; not for rows admitted now.
    num_tokens: (row, count) pairs, flat, for every live row that computes other than 1 token in
        this step; 0 sits out.  A row samples when it has computed all its tokens.
    forced_tokens: (row, token ids) for rows that grow without sampling: tokens a grammar leaves no
        choice about, which follow all tokens the row has (the one it samples in a step in flight
        included).  Not for rows admitted now.
    awaits_mask: sampling waits for this step's GrammarMask.
    """

    step_id: int
    released_rows: list[int] = []
    admitted: list[AdmittedRow] = []
    new_blocks: list[int] = []
    num_tokens: list[int] = []
    forced_tokens: list[tuple[int, list[int]]] = []
    awaits_mask: bool = False


class GrammarMask(msgspec.Struct, frozen=True, array_like=True, tag="mask"):
    """What the sampling rows of a step may sample; follows a plan that awaits it, before the next.

    rows: ascending; others may sample anything.
    bits: int32 [len(rows), ceil(V / 32)], little-endian; bit i % 32 of word i // 32 allows token i.
    """

    step_id: int
    rows: list[int]
    bits: bytes


WorkerInput = SchedulerOutput | GrammarMask


# --- worker -> engine core -----------------------------------------------------------------------


class RowExtras(msgspec.Struct, frozen=True, array_like=True):
    """What one row gives beside its token, as its SamplingParams ask.

    logprobs: of the sampled token.
    prompt_logprobs: of the prompt tokens that follow those computed in this step.
    embedding: float32 [hidden_size], little-endian, when the whole prompt is computed.
    """

    row: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    embedding: bytes | None = None


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """One step's result. sampled_token_ids: one for each row that sampled, in ascending row order.

    extras: for the rows that have any, ascending.
    num_compiles: compilations since ready; 0 unless something is wrong.
    """

    step_id: int
    sampled_token_ids: list[int]
    num_compiles: int = 0
    extras: list[RowExtras] = []


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Sent once by each worker, after warm-up. config: the resolved EngineConfig as msgpack."""

    config: bytes


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker's last message. fix: set when the failure is a UserError."""

    reason: str
    fix: str | None = None


WorkerOutput = ModelRunnerOutput | WorkerReady | WorkerFailed

# --- other hosts -> host 0 -----------------------------------------------------------------------


class HostHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A host's first message. digest: of what all hosts must have been told alike."""

    host_id: int
    name: str
    digest: str


class HostReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All workers of a host are warm. config: the resolved EngineConfig as msgpack."""

    host_id: int
    config: bytes


class HostAlive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Sent every second. digest: CRC-32 of all messages handed to the host's workers so far."""

    host_id: int
    num_messages: int
    digest: int


class HostFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A host's last message. fix: set when the failure is a UserError.

    log: the last lines that its workers wrote.
    """

    host_id: int
    reason: str
    fix: str | None
    log: list[str]


HostReport = HostHello | HostReady | HostAlive | HostFailed

# --- how a child process starts ------------------------------------------------------------------


class RingHandle(msgspec.Struct, frozen=True, array_like=True):
    """A ring buffer as inherited file descriptors (`engine/executor/ring_buffer.py`).

    published, consumed: for each reader the descriptors of its two counters.
    """

    memory_fd: int
    capacity_bytes: int
    published: list[list[int]]
    consumed: list[list[int]]


class EngineCoreStart(msgspec.Struct, frozen=True, array_like=True):
    """What an engine core process is told first. config: an EngineConfig as msgpack.

    input_address: ZMQ address that the engine core binds.
    output_fds: sockets to the API servers, in client_idx order.
    socket_dir: removed by the engine core when its parent dies.
    worker_class: "module:Class" of the worker.
    coordinator_address: where the coordinator hears of each step; empty where there is none.
    """

    config: bytes
    input_address: str
    output_fds: list[int]
    socket_dir: str
    worker_class: str
    coordinator_address: str = ""


class CoordinatorStart(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator is told first. config: an EngineConfig as msgpack.

    input_address, stats_address: ZMQ addresses that the coordinator binds, for API servers and for
        engine cores.
    engine_addresses: one for each engine core, in order; the coordinator connects.
    """

    config: bytes
    input_address: str
    stats_address: str
    engine_addresses: list[str]


class ApiServerStart(msgspec.Struct, frozen=True, array_like=True):
    """What an API server is told first that is not the first process. config: as msgpack.

    client_idx: its place in peer_addresses, at which it listens to the others.
    input_address: takes EngineInput.
    output_fds: sockets from the engine cores, in order.
    listen_fd: the bound socket that all API servers accept from.
    """

    config: bytes
    client_idx: int
    input_address: str
    peer_addresses: list[str]
    output_fds: list[int]
    listen_fd: int


class ProcessGroup(msgspec.Struct, frozen=True, array_like=True):
    """The workers whose devices make one mesh, as one of them sees them.

    coordinator: host:port where rank 0 waits for the others; empty where there are none.
    """

    rank: int = 0
    size: int = 1
    coordinator: str = ""


ALONE = ProcessGroup()


class WorkerStart(msgspec.Struct, frozen=True, array_like=True):
    """What a worker process is told first. config: an EngineConfig as msgpack.

    plan_ring: WorkerInput from the engine core; this worker is its reader `reader_idx`.
    result_ring: WorkerOutput to the engine core, its only reader.
    name: for people, such as "worker 0".
    """

    config: bytes
    group: ProcessGroup
    reader_idx: int
    plan_ring: RingHandle
    result_ring: RingHandle
    worker_class: str
    name: str


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_engine_input = msgspec.msgpack.Decoder(EngineInput).decode
decode_engine_output = msgspec.msgpack.Decoder(EngineOutput).decode
decode_peer_input = msgspec.msgpack.Decoder(PeerInput).decode
decode_worker_input = msgspec.msgpack.Decoder(WorkerInput).decode
decode_worker_output = msgspec.msgpack.Decoder(WorkerOutput).decode
decode_host_report = msgspec.msgpack.Decoder(HostReport).decode
decode_engine_core_start = msgspec.msgpack.Decoder(EngineCoreStart).decode
decode_coordinator_start = msgspec.msgpack.Decoder(CoordinatorStart).decode
decode_api_server_start = msgspec.msgpack.Decoder(ApiServerStart).decode
decode_worker_start = msgspec.msgpack.Decoder(WorkerStart).decode
