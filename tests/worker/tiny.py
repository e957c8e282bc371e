"""A tiny random Llama for the worker's tests: its weights, its compiled steps, and its plans."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelInfo
from jaxserve.messages import AdmittedRow, SamplingParams, SchedulerOutput
from jaxserve.models.registry import model_for
from jaxserve.worker import programs
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.logits_processors import LogitsProcessor
from jaxserve.worker.programs import Programs, RunnerState
from jaxserve.worker.row_options import OptionSpec
from jaxserve.worker.sharding import make_mesh
from jaxserve.worker.step import StepSpec
from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import KVCacheLayout
from tests.checkpoint.numpy_llama import hidden_states, last_logits

INFO = ModelInfo(
    path="",
    format="safetensors",
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    max_position_embeddings=32,
    rms_norm_eps=1e-6,
    rope_theta=100.0,
)
BLOCK_SIZE, BLOCKS_PER_ROW, NUM_BLOCKS, NUM_ROWS = 4, 8, 40, 4
# A step in LARGE nearly always has more writes than the bucket holds, a step in SMALL never has.
SMALL, LARGE = BUCKETS = (Bucket(8, NUM_ROWS, 256), Bucket(24, NUM_ROWS, 8))
EXTRA_WRITES = 16
SPEC = StepSpec(
    INFO,
    KVCacheLayout.for_platform(
        "cpu", INFO.num_layers, INFO.num_kv_heads, INFO.head_dim, "float32", BLOCK_SIZE
    ),
    CHIPS["cpu"],
    "xla",
    "auto",
    jnp.dtype("float32"),
    LARGE.num_tokens,
    make_mesh(jax.local_devices()[:1]),
)


def _scale(logits: jax.Array, args: jax.Array) -> jax.Array:
    return logits * args[:, :1]


def _add_to_id(logits: jax.Array, args: jax.Array) -> jax.Array:
    """Adds to the token of the first argument what the second says."""
    is_token = jnp.arange(logits.shape[1]) == args[:, :1]
    return logits + jnp.where(is_token, args[:, 1:], 0)


OPTIONS = OptionSpec(
    INFO.vocab_size,
    (LogitsProcessor("add_to_id", 2, _add_to_id), LogitsProcessor("scale", 1, _scale)),
)
TOPS = (5, INFO.vocab_size)
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)

# A logit is a chain of about 9 sums a layer over at most 48 terms; each rounds by at most
# sqrt(48) * 2^-24 of what it sums, here below 10, at random: sqrt(18) * sqrt(48) * 2^-24 * 10.
LOGITS_TOLERANCE = 2e-5


def random_params(info: ModelInfo, seed: int) -> dict[str, jax.Array]:
    """float32 parameters that keep activations near 1 and spread logits; norms are near 1."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, spec in model_for(info).param_specs(info).items():
        values = rng.normal(0, 1, spec.shape)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif name not in ("embed", "lm_head") and "bias" not in name:
            values /= spec.shape[-1] ** 0.5
        elif name == "lm_head":
            values *= 0.5
        params[name] = jnp.asarray(values, jnp.float32)
    return params


def checkpoint_tensor(info: ModelInfo, params: dict[str, jax.Array], name: str) -> np.ndarray:
    """The tensor that a checkpoint in Hugging Face names would hold for `params`."""
    whole = {
        "model.embed_tokens.weight": "embed",
        "model.norm.weight": "final_norm",
        "lm_head.weight": "lm_head",
    }
    if name in whole:
        return np.asarray(params[whole[name]])
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)

    def stacked(param: str) -> np.ndarray:
        return np.asarray(params[f"layers.{param}"])[int(layer)]

    group = info.num_heads // info.num_kv_heads
    match part:
        case "self_attn.q_proj":
            return stacked("qkv")[:, :group].reshape(-1, info.hidden_size)
        case "self_attn.k_proj":
            return stacked("qkv")[:, group].reshape(-1, info.hidden_size)
        case "self_attn.v_proj":
            return stacked("qkv")[:, group + 1].reshape(-1, info.hidden_size)
        case "mlp.gate_proj":
            return stacked("gate_up")[0, 0]
        case "mlp.up_proj":
            return stacked("gate_up")[0, 1]
        case _:
            names = {
                "input_layernorm": "attn_norm",
                "self_attn.o_proj": "attn_out",
                "post_attention_layernorm": "mlp_norm",
                "mlp.down_proj": "down",
            }
            return stacked(names[part])


@functools.cache
def params() -> dict[str, jax.Array]:
    """The model that all tests share."""
    return random_params(INFO, seed=0)


@functools.cache
def _expected_logits(token_ids: tuple[int, ...]) -> np.ndarray:
    return last_logits(INFO, functools.partial(checkpoint_tensor, INFO, params()), list(token_ids))


def expected_logits(token_ids: list[int]) -> np.ndarray:
    """The next token's logits, by the NumPy model, from scratch."""
    return _expected_logits(tuple(token_ids))


def expected_hidden(token_ids: list[int]) -> np.ndarray:
    """The hidden states of all tokens after the last norm, by the NumPy model."""
    return hidden_states(INFO, functools.partial(checkpoint_tensor, INFO, params()), token_ids)


def greedy_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that follow `prompt`, each computed from scratch; none is nearly another."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = expected_logits(token_ids)
        second, first = np.sort(logits)[-2:]
        assert first - second > 10 * LOGITS_TOLERANCE, "a tie: choose another prompt"
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return np.random.default_rng([seed, length]).integers(0, INFO.vocab_size, length).tolist()


def shapes(num_blocks: int = NUM_BLOCKS) -> RunnerState:
    """The whole state's shapes."""
    step = programs.state_shapes(SPEC, NUM_ROWS, BLOCKS_PER_ROW, num_blocks)
    return programs.runner_state_shapes(SPEC, OPTIONS, [NUM_ROWS], step)


def fresh_state() -> RunnerState:
    """An empty batch state and an empty cache."""
    return programs.empty_state(shapes())


@functools.cache
def compiled_forward(bucket: Bucket = SMALL, num_blocks: int = NUM_BLOCKS) -> jax.stages.Compiled:
    """The first half of a step, for a cache of any size."""
    return programs.compile_forward(SPEC, bucket, params(), shapes(num_blocks).step)


@functools.cache
def compiled_sample() -> jax.stages.Compiled:
    """The second half of a step."""
    return programs.compile_sample(SPEC, NUM_ROWS, shapes().step)


@functools.cache
def compiled_writes() -> jax.stages.Compiled:
    """Writes outside a step."""
    return programs.compile_writes(shapes().step, EXTRA_WRITES)


@functools.cache
def compiled_programs() -> Programs:
    """All of them, for both buckets."""
    jobs = programs.small_jobs(SPEC, OPTIONS, TOPS, params(), shapes())
    jobs |= {("forwards", b): functools.partial(compiled_forward, b) for b in BUCKETS}
    jobs |= {("samples", NUM_ROWS): compiled_sample, ("writes", None): compiled_writes}
    return programs.join_programs({key: job() for key, job in jobs.items()})


@dataclasses.dataclass
class _Row:
    sampling: SamplingParams
    num_prompt_tokens: int
    known: list[int]
    num_tokens: int
    computed: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    is_new: bool = True


class Planner:
    """Writes plans without a scheduler: row r owns the blocks from 1 + r * BLOCKS_PER_ROW on, and
    gets them one by one as it grows.
    """

    def __init__(self) -> None:
        self._step_id = 0
        self._released: list[int] = []
        self._forced: list[tuple[int, list[int]]] = []
        self.rows: dict[int, _Row] = {}

    def release(self, *rows: int) -> None:
        """The rows end before the next step."""
        for row in rows:
            del self.rows[row]
            self._released.append(row)

    def admit(
        self,
        row: int,
        token_ids: list[int],
        sampling: SamplingParams = GREEDY,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """The row starts with the next step; its tokens may be a prompt and its output so far."""
        assert row not in self.rows
        length = len(token_ids)
        num_prompt_tokens = length if num_prompt_tokens is None else num_prompt_tokens
        self.rows[row] = _Row(sampling, num_prompt_tokens, list(token_ids), length)

    def force(self, row: int, token_ids: list[int]) -> None:
        """The row grows by tokens that it does not sample."""
        self._forced.append((row, token_ids))
        self.rows[row].num_tokens += len(token_ids)

    def missing(self, row: int) -> int:
        """How many tokens the row has yet to compute before it samples."""
        return self.rows[row].num_tokens - self.rows[row].computed

    def plan(
        self, counts: dict[int, int] | None = None, awaits_mask: bool = False
    ) -> tuple[SchedulerOutput, list[int]]:
        """The next step, and the rows that sample in it.

        counts: tokens of the rows that compute other than one.
        """
        counts = counts or {}
        admitted, new_blocks, sampling_rows = [], [], []
        for row, state in sorted(self.rows.items()):
            state.computed += counts.get(row, 1)
            if counts.get(row, 1) and state.computed == state.num_tokens:
                sampling_rows.append(row)
                state.num_tokens += 1
            while len(state.block_ids) * BLOCK_SIZE < state.computed:
                state.block_ids.append(1 + row * BLOCKS_PER_ROW + len(state.block_ids))
                new_blocks += [] if state.is_new else [row, state.block_ids[-1]]
            if state.is_new:
                state.is_new = False
                admitted.append(
                    AdmittedRow(
                        row,
                        state.known,
                        state.num_prompt_tokens,
                        0,
                        list(state.block_ids),
                        state.sampling,
                    )
                )
        self._step_id += 1
        released, self._released = self._released, []
        flat = [number for pair in counts.items() for number in pair]
        forced, self._forced = self._forced, []
        plan = SchedulerOutput(
            self._step_id, released, admitted, new_blocks, flat, forced, awaits_mask
        )
        return plan, sampling_rows
