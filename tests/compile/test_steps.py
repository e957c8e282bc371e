"""Whole serving steps of real models compile for real chips: nothing is copied, no more is moved
between devices than must be, and it fits.

Attention is what the dispatcher chooses for the chip. Qwen3-32B is here as a Llama of its shapes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig, ModelInfo, replace
from jaxserve.models.registry import model_for
from jaxserve.worker import programs, sizing
from jaxserve.worker.buckets import Bucket, make_buckets
from jaxserve.worker.row_options import OptionSpec
from jaxserve.worker.sharding import make_mesh
from jaxserve.worker.step import StepSpec
from jaxserve.worker.weights import param_shapes
from pallas_kernels.aot import devices, lowering_for
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.ragged_paged_attention import explain
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
}
MAX_ROWS, MAX_TOKENS, MAX_LEN = 256, 2048, 8192


@dataclasses.dataclass(frozen=True)
class Step:
    """A program of a step. num_tokens: of the forward; 0: the sampling program.

    cache_share: part of a third of the memory that the weights leave.
    """

    chip: str
    model: str
    num_devices: int
    num_tokens: int
    cache_share: float = 1.0

    def __str__(self) -> str:
        name = f"forward of {self.num_tokens}" if self.num_tokens else "sampling"
        return f"{self.model} on {self.num_devices} {self.chip}, {name}"

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
    def free_bytes(self) -> int:
        """Memory of a device beside its share of the weights."""
        specs = model_for(self.config.info).param_specs(self.config.info, self.num_devices)
        weights = 2 * sum(math.prod(spec.shape) for spec in specs.values()) // self.num_devices
        return int(MEMORY_BYTES[self.chip] * GIB) - weights

    @property
    def num_blocks(self) -> int:
        layout = sizing.kv_cache_layout(self.config, CHIPS[self.chip].platform)
        return int(self.cache_share * self.free_bytes / 3) // layout.bytes_per_page

    @property
    def layer_bytes(self) -> int:
        """Of the keys of one layer, on one device."""
        layout = sizing.kv_cache_layout(self.config, CHIPS[self.chip].platform)
        return self.num_blocks * layout.bytes_per_page // layout.num_layers // 2

    @property
    def layer_weights(self) -> list[list[int]]:
        """Dimensions of each matrix of a layer, as one device has it."""
        mesh = make_mesh(devices(CHIPS[self.chip], self.num_devices))
        params = param_shapes(self.config.info, jnp.dtype("bfloat16"), mesh).values()
        shapes = [list(p.sharding.shard_shape(p.shape)[1:]) for p in params if p.ndim > 2]
        return [[dim for dim in shape if dim > 1] for shape in shapes]

    def program(self) -> "Step":
        return self

    def compile(self, chip: Chip) -> jax.stages.Compiled:
        """As `Worker` does it."""
        config, mesh = self.config, make_mesh(devices(chip, self.num_devices))
        call = sizing.attention_call(config, chip)
        attention = attention_of(self)
        dtype = jnp.dtype("bfloat16")
        spec = StepSpec(config.info, call.layout, chip, attention, dtype, MAX_TOKENS, mesh)
        per_row = sizing.blocks_per_sequence(config)
        state = programs.state_shapes(spec, MAX_ROWS, per_row, self.num_blocks)
        with lowering_for(chip, mesh):
            if self.num_tokens == 0:
                options = OptionSpec(config.info.vocab_size)
                whole = programs.runner_state_shapes(spec, options, [MAX_ROWS], state)
                return programs.compile_option_sample(spec, options, MAX_ROWS, whole)
            params = param_shapes(config.info, dtype, mesh)
            return programs.compile_forward(spec, bucket(self.num_tokens), params, state)


@functools.cache
def bucket(num_tokens: int) -> Bucket:
    return next(b for b in make_buckets(MAX_TOKENS, MAX_ROWS) if b.num_tokens == num_tokens)


def steps(is_fast: bool) -> list[tuple[Step, ...]]:
    """Jobs that belong together: with half as many KV blocks too, where that is looked at."""
    fast = [
        Step("v5e", "Llama-3-8B", 4, MAX_ROWS),
        Step("v6e", "Qwen3-32B", 8, MAX_ROWS),
        Step("tpu7x", "Llama-3.3-70B", 8, MAX_ROWS),
        Step("h100", "Llama-3.3-70B", 8, MAX_ROWS),
        Step("b200", "Llama-3-8B", 4, MAX_TOKENS),
        Step("v6e", "Qwen3-32B", 8, 0),
        Step("h100", "Llama-3-8B", 4, 0),
    ]
    if is_fast:
        return [(step,) for step in fast]
    every = [
        Step(chip, model, num_devices, num_tokens)
        for chip in MEMORY_BYTES
        for model in MODELS
        for num_devices in (4, 8)
        for num_tokens in (MAX_ROWS, MAX_TOKENS)
    ]
    fitting = [step for step in every if step.free_bytes > 2 * GIB]
    together = [(step, dataclasses.replace(step, cache_share=0.5)) for step in fitting]
    samplings = [
        Step(chip, model, 8, 0) for chip in MEMORY_BYTES for model in ("Llama-3-8B", "Qwen3-32B")
    ]
    return together + [(step,) for step in samplings]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "jobs" in metafunc.fixturenames:
        jobs = steps(metafunc.config.getoption("fast"))
        metafunc.parametrize("jobs", jobs, ids=[str(step) for step, *_ in jobs])


def test_step(compilers: Compilers, table: list[str], jobs: tuple[Step, ...]) -> None:
    temp_sizes = set()
    for step in jobs:
        result = compilers.submit(step).result()
        assert not isinstance(result, Refused), result.words
        if step.num_tokens:
            check_forward(step, result)
        else:
            check_sampling(step, result)
        temp_sizes.add(result.temp_bytes)
    assert len(temp_sizes) == 1, f"temporary bytes depend on the number of blocks: {temp_sizes}"
    moved = hlo.collectives(result.hlo)
    names = ", ".join(f"{each.name} {each.num_bytes} B" for each in moved)
    if jobs[0].num_tokens and CHIPS[jobs[0].chip].platform == "gpu":
        names += f"; {len(hlo.kernels_of_loops(result.hlo))} kernels in loops"
    table.append(
        f"{jobs[0]}, {attention_of(jobs[0])}: {result.argument_bytes / GIB:.2f} GiB given, "
        f"{result.temp_bytes / GIB:.2f} GiB temporary; {names}"
    )


def attention_of(step: Step) -> str:
    """The implementation that its attention has."""
    chosen = explain(sizing.attention_call(step.config, CHIPS[step.chip])).chosen
    assert chosen is not None
    return chosen


def check_forward(step: Step, result: Compiled) -> None:
    """In place, without a copy of the cache or of weights, and with three sums over devices."""
    info = step.config.info
    layer_bytes = step.layer_bytes
    assert result.alias_bytes >= 2 * info.num_layers * layer_bytes, "the cache is not donated"
    # Half of the keys of a layer, or its gate and up, where activations are not as large.
    gate_up = 2 * 2 * info.intermediate_size * info.hidden_size // step.num_devices
    activations = 4 * step.num_tokens * info.hidden_size
    assert not hlo.copies(result.hlo, min(layer_bytes // 2, max(gate_up, activations + 1)))
    used = result.argument_bytes + result.temp_bytes + result.output_bytes - result.alias_bytes
    assert used < MEMORY_BYTES[step.chip] * GIB
    moved = hlo.collectives(result.hlo)
    # The embedding, which is split by token; in the loop over layers, after attention and MLP.
    assert [each.name for each in moved] == ["all-reduce"] * 3, moved
    assert {each.num_bytes for each in moved} == {2 * step.num_tokens * info.hidden_size}
    assert sum("psum" in each.source and "while" in each.source for each in moved) == 2
    assert sum("gather" in each.source for each in moved) == 1
    if CHIPS[step.chip].platform == "gpu":
        weights = step.layer_weights
        for kernel in hlo.kernels_of_loops(result.hlo):
            assert not [dims for dims in kernel.dims if dims in weights], f"a copy: {kernel}"
    if attention_of(step) == "gpu":
        # Where work lies does not depend on the layer: no layer makes arrays of integers.
        assert not [each for each in hlo.kernels_of_loops(result.hlo) if each.is_of_integers]


# What sampling, grammars and options included, may move: the operation in JAX, and bytes a row.
SAMPLING = {
    "reduce": 4 * 2 * 8,  # of argmax: each device's best
    "reduce_max": 4,  # the largest logit
    "reduce_sum": 4 * 1024,  # counts and weights above a threshold; the sum of each tile
    "reduce_or": 4,  # whether any row needs an option
    "reduce_and": 4,
    "gather": 4 * 256,  # the tile in which the token lies
}


def check_sampling(step: Step, result: Compiled) -> None:
    """Logits stay where they are: nothing that is moved grows with the vocabulary by more than a
    sum a tile."""
    for each in hlo.collectives(result.hlo):
        operation = each.source.rsplit("/", 1)[-1]
        assert operation in SAMPLING, each
        assert each.num_bytes <= MAX_ROWS * SAMPLING[operation], each
    logits_bytes = 4 * MAX_ROWS * step.config.info.vocab_size
    assert result.temp_bytes < logits_bytes, "more than one device's share and its shadows"
