"""The programs of whole serving steps, for real models on slices of real chips.

Attention is what the dispatcher chooses for the chip. Qwen3-32B is here as a Llama of its shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelInfo, replace
from jaxserve.models.registry import model_for
from jaxserve.worker import programs, sizing
from jaxserve.worker.buckets import Bucket, make_buckets
from jaxserve.worker.row_options import OptionSpec
from jaxserve.worker.sharding import kv_cache_shapes, make_mesh
from jaxserve.worker.step import StepSpec
from jaxserve.worker.weights import param_shapes
from pallas_kernels import aot
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.ragged_paged_attention import KVCacheLayout, explain
from tests.compile import hlo
from tests.compile.compilers import Compiled, Compilers, Refused

GIB = 2**30
# Memory of a device, of which the rest is the runtime's.
MEMORY_BYTES = {"v5e": 15.5, "v6e": 31, "tpu7x": 94, "h100": 76, "b200": 175}
# Layers, hidden, MLP, heads, KV heads, vocabulary; heads are 128 wide.
MODELS = {
    "Llama-3-8B": (32, 4096, 14336, 32, 8, 128256),
    "Qwen3-32B": (64, 5120, 25600, 64, 8, 151936),
    "Llama-3.3-70B": (80, 8192, 28672, 64, 8, 128256),
    "Llama-3.1-405B": (126, 16384, 53248, 128, 8, 128256),
    "half of Llama-3.1-405B": (63, 16384, 53248, 128, 8, 128256),
}
MAX_ROWS, MAX_TOKENS, MAX_LEN = 256, 2048, 8192

# How the chips of a slice are dealt out to a number of hosts: of the TPU's grid, each host's part.
_TPU_HOSTS = {("v5e", 16, 2): ("4x4", (2, 4, 1)), ("v5e", 16, 4): ("4x4", (2, 2, 1))}


@dataclasses.dataclass(frozen=True)
class Step:
    """A program of a step.

    num_tokens: of its bucket.
    samples: whether it is the program that samples the bucket's rows, options included; else the
      forward.
    num_cached: tokens that the KV cache holds at least; None: as many as `cache_share` of a third
      of the memory holds that the weights leave.
    num_hosts: that have an equal share of the devices each; 1: however that is.
    """

    chip: str
    model: str
    num_devices: int
    num_tokens: int
    samples: bool = False
    cache_share: float = 1.0
    num_cached: int | None = None
    num_hosts: int = 1

    def __str__(self) -> str:
        name = "sampling" if self.samples else "forward"
        hosts = f" of {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        return f"{self.model} on {self.num_devices} {self.chip}{hosts}, {name} of {self.num_tokens}"

    @property
    def config(self) -> EngineConfig:
        num_layers, hidden_size, mlp, num_heads, num_kv_heads, vocab_size = MODELS[self.model]
        info = ModelInfo(
            path="",
            format="safetensors",
            architecture="LlamaForCausalLM",
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=mlp,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            vocab_size=vocab_size,
            max_position_embeddings=MAX_LEN,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
        )
        return replace(
            EngineConfig(),
            info=info,
            dtype="bfloat16",
            max_model_len=MAX_LEN,
            block_size=128 if CHIPS[self.chip].platform == "tpu" else 64,
            mesh=f"1x{self.num_devices}",
        )

    @property
    def bucket(self) -> Bucket:
        return _buckets()[self.num_tokens]

    @property
    def layout(self) -> KVCacheLayout:
        """Of the KV cache of one device."""
        return sizing.kv_cache_layout(self.config, CHIPS[self.chip].platform)

    @property
    def weight_bytes(self) -> int:
        """A device's share of the weights, if each of them is cut."""
        specs = model_for(self.config.info).param_specs(self.config.info, self.num_devices)
        return 2 * sum(math.prod(spec.shape) for spec in specs.values()) // self.num_devices

    @property
    def free_bytes(self) -> int:
        """Memory of a device beside its share of the weights."""
        return int(MEMORY_BYTES[self.chip] * GIB) - self.weight_bytes

    @property
    def num_blocks(self) -> int:
        if self.num_cached is not None:
            return 1 + -(-self.num_cached // self.config.cache.block_size)
        return int(self.cache_share * self.free_bytes / 3) // self.layout.bytes_per_page

    @property
    def cache_bytes(self) -> int:
        """Of the KV cache, on one device."""
        return self.num_blocks * self.layout.bytes_per_page

    @property
    def layer_bytes(self) -> int:
        """Of the keys of one layer, on one device."""
        return self.cache_bytes // self.layout.num_layers // 2

    @property
    def layer_weights(self) -> list[list[int]]:
        """Dimensions of each matrix of a layer, as one device has it."""
        params = param_shapes(self.config.info, jnp.dtype("bfloat16"), self.mesh()).values()
        shapes = [list(p.sharding.shard_shape(p.shape)[1:]) for p in params if p.ndim > 2]
        return [[dim for dim in shape if dim > 1] for shape in shapes]

    @property
    def large_dims(self) -> list[list[int]]:
        """Dimensions of each matrix and each cache, of all layers and of one, on one device and on
        all; without those that are 1."""
        params = dict(param_shapes(self.config.info, jnp.dtype("bfloat16"), self.mesh()))
        caches = kv_cache_shapes(self.layout, self.num_blocks, self.mesh())
        found = []
        matrices = {name: leaf for name, leaf in params.items() if not name.endswith("norm")}
        for leaf in jax.tree.leaves((matrices, caches)):
            for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
                found += [[dim for dim in part if dim > 1] for part in (shape, shape[1:])]
        return [dims for dims in found if len(dims) > 1]

    def mesh(self) -> Mesh:
        """Of devices in the order in which JAX has them."""
        return make_mesh(_devices(CHIPS[self.chip], self.num_devices, self.num_hosts))

    def program(self) -> "Step":
        return self

    def compile(self, chip: Chip) -> jax.stages.Compiled:
        """As `Worker` does it."""
        config, mesh = self.config, self.mesh()
        call = sizing.attention_call(config, chip)
        dtype = jnp.dtype("bfloat16")
        names = (attention_of(self), "auto")
        spec = StepSpec(config.info, call.layout, chip, *names, dtype, MAX_TOKENS, mesh)
        per_row = sizing.blocks_per_sequence(config)
        state = programs.state_shapes(spec, MAX_ROWS, per_row, self.num_blocks)
        with aot.lowering_for(chip, mesh):
            if self.samples:
                options, num_rows = OptionSpec(config.info.vocab_size), self.bucket.num_rows
                whole = programs.runner_state_shapes(spec, options, [num_rows], state)
                return programs.compile_option_sample(spec, options, num_rows, whole)
            params = param_shapes(config.info, dtype, mesh)
            return programs.compile_forward(spec, self.bucket, params, state)


def compiled(compilers: Compilers, step: Step) -> Compiled:
    """What the compiler made of a step, which it must not refuse."""
    result = compilers.submit(step).result()
    assert not isinstance(result, Refused), result.words
    return result


def attention_of(step: Step) -> str:
    """The implementation that its attention has."""
    chosen = explain(sizing.attention_call(step.config, CHIPS[step.chip])).chosen
    assert chosen is not None
    return chosen


@functools.cache
def _buckets() -> dict[int, Bucket]:
    return {each.num_tokens: each for each in make_buckets(MAX_TOKENS, MAX_ROWS)}


def _devices(chip: Chip, count: int, num_hosts: int) -> Sequence[jax.Device]:
    if num_hosts == 1:
        return aot.devices(chip, count)
    return _devices_of_hosts(chip, count, num_hosts)


@functools.cache
def _devices_of_hosts(chip: Chip, count: int, num_hosts: int) -> Sequence[jax.Device]:
    if chip.platform == "gpu":
        topology = topologies.get_topology_desc(
            "",
            platform="cuda",
            target_config=aot._gpu_target(chip),
            topology=f"1x{num_hosts}x{count // num_hosts}",
        )
    else:
        name, part = _TPU_HOSTS[chip.name, count, num_hosts]
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{name}", chips_per_host_bounds=part
        )
    per_host = [
        sum(each.process_index == host for each in topology.devices) for host in range(num_hosts)
    ]
    assert per_host == [count // num_hosts] * num_hosts, per_host
    return topology.devices


# What sampling, grammars and options included, may move: the operation in JAX, and bytes a row.
_SAMPLING = {
    "reduce": 4 * 2 * 16,  # of argmax: the best of each of up to 16 devices
    "reduce_max": 4,  # the largest logit
    "reduce_sum": 4 * 1024,  # counts and weights above a threshold; the sum of each tile
    "reduce_or": 4,  # whether any row needs an option; on a TPU a tile of 128 lanes, for all rows
    "reduce_and": 4,
    "gather": 4 * 256,  # the tile in which the token lies
}


def check_sampling(step: Step, result: Compiled) -> None:
    """Logits stay where they are: nothing that is moved grows with the vocabulary by more than a
    sum a tile."""
    for each in hlo.collectives(result.hlo):
        operation = each.source.rsplit("/", 1)[-1]
        assert operation in _SAMPLING, each
        assert each.num_bytes <= max(512, step.bucket.num_rows * _SAMPLING[operation]), each
    logits_bytes = 4 * step.bucket.num_rows * step.config.info.vocab_size
    assert result.temp_bytes < logits_bytes, "more than one device's share and its shadows"
