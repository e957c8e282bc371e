"""The one configuration: built from flags, a YAML file or keyword arguments, resolved once.

Fields whose value is 0, "" or "auto" in a user's config are derived: those that follow from the
model by `resolve_for_model`, those that need devices by the worker (`worker/sizing.py`). The engine
core hands the resolved config to everyone else; `check_resolved` says that nothing is left open.
"""

import logging
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from jaxserve.errors import UserError

logger = logging.getLogger(__name__)

_MAX_PORT = 65535
_MAX_MESH = 4096  # devices along an axis
_MAX_ENGINE_CORES = 64


class ModelInfo(Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself; read without jax (`checkpoint/`), not set by flags."""

    path: str
    format: Literal["gguf", "safetensors"]
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float | str] = {}
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model, at which precision and length."""

    model: Annotated[
        str, Meta(description="Model: a known name, a .gguf file, a directory or a hub id.")
    ] = ""
    served_model_name: Annotated[
        str, Meta(description="Name clients use in 'model'; default: the model as given.")
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(description="Type of weights, activations and KV cache; auto: fastest here."),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        Meta(
            description="What weights are rounded to when they are loaded; int8: matrices to 8 "
            "bits with a scale for each output channel, about half the memory of bfloat16."
        ),
    ] = "none"
    max_model_len: Annotated[
        int, Meta(ge=0, description="Longest prompt plus output, tokens; 0: the model's limit.")
    ] = 0
    seed: Annotated[
        int, Meta(ge=0, description="Seed for requests without one; 0: from the OS.")
    ] = 0
    max_logprobs: Annotated[
        int,
        Meta(ge=-1, description="Most log-probabilities a request gets for a token; -1: no limit."),
    ] = 20
    pooling: Annotated[
        Literal["last", "mean", "cls"],
        Meta(description="What /v1/embeddings makes of a prompt's hidden states by default."),
    ] = "last"
    info: ModelInfo | None = None
    # (name, number of arguments) of each installed one; the worker finds them.
    logits_processors: tuple[tuple[str, int], ...] | None = None


class CacheConfig(Struct, frozen=True, kw_only=True):
    """KV cache: blocks, their number, prefix sharing."""

    block_size: Annotated[
        int, Meta(ge=0, le=4096, description="Tokens in a KV block; 0: what suits the platform.")
    ] = 0
    num_kv_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks; 0: as many as the measured free memory holds.")
    ] = 0
    kv_cache_memory_bytes: Annotated[
        int, Meta(ge=0, description="Memory for KV blocks; 0: what is free, 2 GiB on a CPU.")
    ] = 0
    memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Part of device memory the worker may use.")
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse KV blocks of equal prompt beginnings.")
    ] = True


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """How much runs at once, and in which order."""

    max_num_seqs: Annotated[
        int, Meta(ge=0, le=4096, description="Most requests in a step; 0: what suits the platform.")
    ] = 0
    max_num_batched_tokens: Annotated[
        int, Meta(ge=0, le=2**17, description="Most tokens in a step; 0: what suits the platform.")
    ] = 0
    max_num_mixed_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**17,
            description="Most tokens in a step while a request waits for its next token: long "
            "prompts are cut smaller, so that it comes soon; 0: what suits the platform.",
        ),
    ] = 0
    jump_ahead_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Tokens of a step that take no longer than one: tokens that a grammar "
            "leaves no choice about fill steps up to here; 0: what suits the platform.",
        ),
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="Order of waiting requests.")
    ] = "fcfs"
    async_scheduling: Annotated[
        bool, Meta(description="Plan the next step while the last one runs.")
    ] = True


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """How many devices share the model, and how many models there are."""

    mesh: Annotated[
        str,
        Meta(
            description="Devices as DxM: M share the weights and the KV cache; D times, each an "
            "engine core."
        ),
    ] = "1x1"
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=_MAX_ENGINE_CORES,
            description="Engine cores, each with a mesh of devices and the whole model; a "
            "coordinator shares the requests out.",
        ),
    ] = 1
    workers_per_host: Annotated[
        int,
        Meta(ge=1, description="Worker processes that share a host's devices of the mesh equally."),
    ] = 1
    num_hosts: Annotated[
        int,
        Meta(
            ge=0,
            description="Hosts that share the devices of the mesh equally; 0: those that "
            "LeaderWorkerSet, GKE or Slurm name in the environment, else 1.",
        ),
    ] = 0
    host_id: Annotated[
        int, Meta(ge=0, description="Which of them this is; 0 serves, the others run workers.")
    ] = 0
    coordinator: Annotated[
        str,
        Meta(description="HOST:PORT of host 0, where the others reach it; two more ports follow."),
    ] = ""

    data_parallel_rank: int = 0  # which of the engine cores, in what it and its workers get

    @property
    def suffix(self) -> str:
        """For the names of what each engine core has; empty where there is one only."""
        return f" {self.data_parallel_rank}" if self.data_parallel_size > 1 else ""

    @property
    def num_workers(self) -> int:
        """Worker processes of all hosts, for one engine core."""
        return self.num_hosts * self.workers_per_host

    @property
    def num_devices(self) -> int:
        """All devices of the mesh."""
        data, model = _parse_mesh(self.mesh)
        return data * model


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """The processes and programs that run the model."""

    executor: Annotated[
        Literal["worker", "in_process"],
        Meta(description="Run the model in a process of its own, or in the engine core's."),
    ] = "worker"
    attention: Annotated[
        Literal["auto", "tpu", "gpu", "cpu", "xla", "reference"],
        Meta(description="Paged attention implementation; a named one is used or refused."),
    ] = "auto"
    matmul: Annotated[
        Literal["auto", "cpu", "xla"],
        Meta(
            description="Products with weights: cpu is C that this machine's compiler makes, for "
            "bfloat16 and int8; a named one is used or refused."
        ),
    ] = "auto"
    compilation_cache_dir: Annotated[
        str, Meta(description="Where compiled programs are kept; default: ~/.cache/jaxserve.")
    ] = ""
    forbid_compile: Annotated[
        bool, Meta(description="Fail if anything compiles after warm-up.")
    ] = False
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="A step that takes longer fails the engine, seconds.")
    ] = 300.0


class ChatConfig(Struct, frozen=True, kw_only=True):
    """How chats become prompts, and answers become messages."""

    chat_template: Annotated[
        str, Meta(description="Chat template, or a file with it, instead of the model's.")
    ] = ""
    default_chat_template_kwargs: Annotated[
        str,
        Meta(description="Variables for the chat template, a JSON object; requests may differ."),
    ] = ""
    trust_request_chat_template: Annotated[
        bool, Meta(description="Let requests bring a chat template of their own.")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="Let the model decide whether it calls a tool.")
    ] = True
    tool_call_parser: Annotated[
        str, Meta(description="How the model writes tool calls; auto: as its chat template does.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Meta(description="How the model writes reasoning; auto: as its chat template does.")
    ] = ""


class ServerConfig(Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port to listen on.")] = 8000
    uds: Annotated[
        str, Meta(description="Unix socket to listen on, instead of an address and a port.")
    ] = ""
    api_server_count: Annotated[
        int,
        Meta(ge=1, le=64, description="Processes that serve HTTP, on the same port."),
    ] = 1
    root_path: Annotated[
        str, Meta(description="Path under which a proxy shows this server, such as /llm.")
    ] = ""
    ssl_certfile: Annotated[
        str, Meta(description="TLS certificate and those that signed it, PEM; turns TLS on.")
    ] = ""
    ssl_keyfile: Annotated[
        str, Meta(description="Key of the certificate, PEM; default: in the same file.")
    ] = ""
    ssl_ca_certs: Annotated[
        str, Meta(description="PEM file with what signs the certificates of clients.")
    ] = ""
    ssl_cert_reqs: Annotated[
        int,
        Meta(ge=0, le=2, description="Certificates of clients: 0 none, 1 optional, 2 required."),
    ] = 0
    api_key: Annotated[
        tuple[str, ...],
        Meta(description="Keys of which clients must bring one, but for probes and metrics."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="Web sites whose pages may call this server; * is any; default: none."),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Meta(description="Methods that pages of those sites may use.")
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...], Meta(description="Headers that pages of those sites may send.")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Meta(description="Browsers may send what they know of a user of this server.")
    ] = False
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body, bytes.")] = (
        8 * 1024 * 1024
    )
    request_timeout_s: Annotated[
        float, Meta(ge=0, description="Longest time a client takes to send a request; 0: any.")
    ] = 60.0
    sse_keepalive_s: Annotated[
        float,
        Meta(ge=0, description="Silence in a stream before a comment is sent; 0: no comment."),
    ] = 15.0
    max_num_queued_reqs: Annotated[
        int, Meta(ge=0, description="Most sequences without a first token; 0: no limit.")
    ] = 0
    max_num_queued_tokens: Annotated[
        int, Meta(ge=0, description="Most prompt tokens of such sequences; 0: no limit.")
    ] = 0
    response_store_bytes: Annotated[
        int,
        Meta(ge=0, description="Memory for answers of /v1/responses that are kept; 0: none."),
    ] = 256 * 1024 * 1024
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe log level.")
    ] = "info"


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Everything, handed to every class of the engine."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    worker: WorkerConfig = WorkerConfig()
    chat: ChatConfig = ChatConfig()
    server: ServerConfig = ServerConfig()

    @property
    def info(self) -> ModelInfo:
        """The checkpoint's own description; an assertion before `resolve_for_model`."""
        assert self.model.info is not None, "config is not resolved"
        return self.model.info


SECTIONS: dict[str, type[Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "worker": WorkerConfig,
    "chat": ChatConfig,
    "server": ServerConfig,
}


def encode_config(config: EngineConfig) -> bytes:
    """As msgpack, for a child process."""
    return msgspec.msgpack.encode(config)


def decode_config(data: bytes) -> EngineConfig:
    """Inverse of `encode_config`."""
    return msgspec.msgpack.decode(data, type=EngineConfig)


def replace(config: EngineConfig, **flat: object) -> EngineConfig:
    """A copy with some fields (named without their section; names are unique) changed."""
    sections = {}
    for name, struct in SECTIONS.items():
        mine = {k: flat.pop(k) for k in list(flat) if k in struct.__struct_fields__}
        if mine:
            sections[name] = msgspec.structs.replace(getattr(config, name), **mine)
    assert not flat, f"no such config field: {sorted(flat)}"
    return msgspec.structs.replace(config, **sections)


def resolve_for_model(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Derives what follows from the checkpoint. The mesh that results is one engine core's, 1xM.

    Raises:
      UserError: `--max-model-len` is longer than the model's positions, or below 2; `--mesh` is
        none, or cannot be shared by the workers; hosts are not numbered or found, or have several
        engine cores.
    """
    config = _split_data_axis(config)
    config = replace(config, num_hosts=max(1, config.parallel.num_hosts))
    _check_workers(config)
    limit = info.max_position_embeddings
    max_model_len = config.model.max_model_len or limit
    if max_model_len > limit:
        raise UserError(
            f"--max-model-len {max_model_len} is longer than the model's limit of {limit} tokens.",
            fix=f"Use --max-model-len {limit} or less.",
        )
    if max_model_len < 2:
        raise UserError(
            f"--max-model-len {max_model_len} leaves no room for a prompt and an output.",
            fix=f"Use --max-model-len {limit}, or any from 2.",
        )
    if config.server.api_server_count > 1 and config.server.response_store_bytes:
        logger.info("response_store_bytes = 0: API servers do not share what they keep")
        config = replace(config, response_store_bytes=0)
    return replace(
        config,
        info=info,
        max_model_len=max_model_len,
        served_model_name=config.model.served_model_name or config.model.model,
    )


def _split_data_axis(config: EngineConfig) -> EngineConfig:
    """A data axis of D is D engine cores: the shares of a batch meet nowhere in a dense model."""
    data, model = _parse_mesh(config.parallel.mesh)
    if data == 1:
        return config
    num_cores = data * config.parallel.data_parallel_size
    if num_cores > _MAX_ENGINE_CORES:
        raise UserError(
            f"--mesh {config.parallel.mesh} --data-parallel-size "
            f"{config.parallel.data_parallel_size} are {num_cores} engine cores, more than the "
            f"{_MAX_ENGINE_CORES} that a server has.",
            fix="Use fewer, or start several servers and put a gateway before them.",
        )
    logger.info("mesh = %s: %d engine cores of 1x%d", config.parallel.mesh, num_cores, model)
    return replace(config, mesh=f"1x{model}", data_parallel_size=num_cores)


def _check_workers(config: EngineConfig) -> None:
    parallel = config.parallel
    mesh, num_devices = parallel.mesh, parallel.num_devices
    if parallel.num_hosts > 1 and parallel.data_parallel_size > 1:
        raise UserError(
            "Several engine cores, of --data-parallel-size or --mesh DxM, share the devices of one "
            f"host, and there are {parallel.num_hosts} hosts: --num-hosts, or the environment.",
            fix="Start one server for each group of hosts, and put a gateway before them.",
        )
    if num_devices % parallel.num_workers:
        flag, count = "--workers-per-host", parallel.workers_per_host
        if num_devices % parallel.num_hosts:
            flag, count = "--num-hosts", parallel.num_hosts
        raise UserError(
            f"{flag} {count} cannot share the {num_devices} devices of --mesh {mesh} equally.",
            fix="Use numbers whose product divides that of --mesh.",
        )
    if parallel.num_workers > 1 and config.worker.executor == "in_process":
        raise UserError(
            "--executor in_process has one worker, not those of --workers-per-host or --num-hosts.",
            fix="Use --executor worker.",
        )
    if parallel.num_hosts == 1:
        if parallel.host_id or parallel.coordinator:
            raise UserError(
                "--host-id and --coordinator are for several hosts, and there is one.",
                fix="Give every host the same --num-hosts as well.",
            )
        return
    if parallel.host_id >= parallel.num_hosts:
        raise UserError(
            f"--host-id {parallel.host_id} is none of --num-hosts {parallel.num_hosts}.",
            fix=f"Number the hosts from 0 to {parallel.num_hosts - 1}.",
        )
    host, _, port = parallel.coordinator.rpartition(":")
    if not (host and 0 < _number(port) <= _MAX_PORT - 2):
        raise UserError(
            f"--coordinator {parallel.coordinator!r} is not HOST:PORT with a port up to "
            f"{_MAX_PORT - 2}; two more follow it.",
            fix="Name host 0 as the others reach it, such as --coordinator 10.0.0.5:8470.",
        )


def _parse_mesh(mesh: str) -> tuple[int, int]:
    """Lengths of the axes data and model."""
    data, _, model = mesh.partition("x")
    lengths = _number(data), _number(model)
    if not all(0 < length <= _MAX_MESH for length in lengths):
        raise UserError(
            f"--mesh {mesh!r} is not two numbers of devices from 1 to {_MAX_MESH}.",
            fix="Use DxM, such as --mesh 1x4.",
        )
    return lengths


def _number(text: str) -> int:
    """What the decimal digits of `text` say; 0 if it has others, or too many for any use."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def check_resolved(config: EngineConfig) -> EngineConfig:
    """Asserts that no derived value is left open; returns `config`."""
    derived = (
        (config.model, ("max_model_len", "served_model_name", "dtype", "info")),
        (config.cache, ("block_size", "num_kv_blocks")),
        (
            config.scheduler,
            (
                "max_num_seqs",
                "max_num_batched_tokens",
                "max_num_mixed_tokens",
                "jump_ahead_tokens",
            ),
        ),
        (config.parallel, ("num_hosts",)),
        (config.worker, ("attention", "matmul", "compilation_cache_dir")),
    )
    open_fields = [
        name
        for section, names in derived
        for name in names
        if getattr(section, name) in (0, "", "auto", None)
    ]
    assert not open_fields, f"not resolved: {open_fields}"
    return config
