"""Meshes of up to eight virtual devices beside one device; `test_sharding` runs this file in a
process that has so many."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from msgspec.structs import replace

from jaxserve import config as configs
from jaxserve.config import ModelInfo
from jaxserve.messages import SamplingParams, TokenLogprobs
from jaxserve.worker import programs, sizing
from jaxserve.worker.batch_mirror import BatchMirror
from jaxserve.worker.batch_state import unpack_delta
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.programs import RunnerState
from jaxserve.worker.row_options import OptionSpec
from jaxserve.worker.sharding import device_bytes, make_mesh
from jaxserve.worker.step import StepSpec
from jaxserve.worker.weights import load_params, param_shapes
from tests.worker import tiny
from tests.worker.checkpoints import write_checkpoint

DEVICES = jax.local_devices()
assert len(DEVICES) == 8, f"{len(DEVICES)} devices; run tests/worker/test_sharding.py"
SEEDED = SamplingParams(max_tokens=99, temperature=3.0, top_k=50, top_p=0.98, min_p=0.01, seed=7)

# heads, KV heads, and what else is hard about them
MODELS = {
    "two KV heads on each": {"num_heads": 16, "num_kv_heads": 8},
    "unequal shares of queries": {"num_heads": 6, "num_kv_heads": 2, "attention_bias": True},
    "one KV head": {"num_heads": 6, "num_kv_heads": 1, "intermediate_size": 50},
    "a dummy KV head": {"num_heads": 9, "num_kv_heads": 3, "tie_word_embeddings": True},
    "an odd vocabulary": {"vocab_size": 66, "tie_word_embeddings": True},
}


def spec_of(info: ModelInfo, mesh: Mesh) -> StepSpec:
    config = configs.replace(
        configs.EngineConfig(),
        info=info,
        dtype="float32",
        block_size=tiny.BLOCK_SIZE,
        mesh=f"1x{mesh.size}",
    )
    layout = sizing.kv_cache_layout(config, "cpu")
    return dataclasses.replace(tiny.SPEC, info=info, layout=layout, mesh=mesh)


def shapes_of(spec: StepSpec) -> RunnerState:
    step = programs.state_shapes(spec, tiny.NUM_ROWS, tiny.BLOCKS_PER_ROW, tiny.NUM_BLOCKS)
    options = OptionSpec(spec.info.vocab_size, tiny.OPTIONS.processors)
    return programs.runner_state_shapes(spec, options, [tiny.NUM_ROWS], step)


def uploads() -> list[np.ndarray]:
    """Two prompts in chunks, then decoding, with a row that sits out."""
    planner, mirror = tiny.Planner(), BatchMirror(tiny.NUM_ROWS, tiny.BLOCKS_PER_ROW)
    planner.admit(0, tiny.prompt(6))
    planner.admit(2, tiny.prompt(9), SEEDED)
    plans = [planner.plan({0: 4, 2: 3}), planner.plan({0: 2, 2: 6}), planner.plan()]
    plans += [planner.plan({0: 0}), planner.plan(), planner.plan()]
    buffers = []
    for plan, _ in plans:
        buffers.append(np.empty(tiny.SMALL.delta_len, np.int32))
        mirror.apply(plan).fill(buffers[-1], tiny.SMALL, tiny.NUM_ROWS)
    return buffers


def run_steps(
    info: ModelInfo, mesh: Mesh, quantization: str = "none"
) -> tuple[list[np.ndarray], list[list[int]], str]:
    """Logits and tokens of the rows that sample, step by step, and the forward's HLO."""
    spec = spec_of(info, mesh)
    shapes, params = shapes_of(spec), load_params(info, jnp.float32, mesh, quantization)
    planned = param_shapes(info, jnp.float32, mesh, quantization)
    facts = [jax.tree.map(lambda a: (a.shape, a.sharding), tree) for tree in (params, planned)]
    assert facts[0] == facts[1]
    forward = programs.compile_forward(spec, tiny.SMALL, params, shapes.step)
    sample = programs.compile_sample(spec, tiny.NUM_ROWS, shapes.step)
    state = programs.empty_state(shapes.step)
    all_logits, all_tokens = [], []
    for buffer in uploads():
        delta = unpack_delta(buffer, tiny.SMALL)
        logits, rows, state = forward(params, state, jax.device_put(buffer, state.table.sharding))
        tokens, table = sample(logits, rows, state.table)
        state = state._replace(table=table)
        samples = np.zeros(tiny.NUM_ROWS, bool)
        samples[: delta.num_rows[0]] = delta.samples[: delta.num_rows[0]]
        all_logits.append(np.asarray(logits)[samples])
        all_tokens.append(np.asarray(tokens)[samples].tolist())
    return all_logits, all_tokens, forward.as_text()


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory):
    """By name of the model: its checkpoint, and what one device makes of the steps."""

    @functools.cache
    def run(name: str) -> tuple[ModelInfo, list[np.ndarray], list[list[int]]]:
        info = write_checkpoint(tmp_path_factory.mktemp("model"), **MODELS[name])
        logits, tokens, _ = run_steps(info, make_mesh(DEVICES[:1]))
        return info, logits, tokens

    return run


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        pytest.param("a dummy KV head", 2, marks=pytest.mark.slow),
        ("two KV heads on each", 4),
        pytest.param("unequal shares of queries", 4, marks=pytest.mark.slow),
        ("an odd vocabulary", 4),
        ("one KV head", 8),
        ("a dummy KV head", 8),
    ],
)
def test_logits_and_tokens_are_those_of_one_device(name, num_devices, on_one_device):
    info, want_logits, want_tokens = on_one_device(name)
    got_logits, got_tokens, hlo = run_steps(info, make_mesh(DEVICES[:num_devices]))
    assert sum(map(len, want_tokens)) == 9
    for got, want in zip(got_logits, want_logits, strict=True):
        # Sums are cut into parts, so each rounds differently: twice the error of one device.
        np.testing.assert_allclose(got, want, rtol=0, atol=2 * tiny.LOGITS_TOLERANCE)
    assert got_tokens == want_tokens
    collectives = re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", hlo)
    # In the loop over layers after attention and after the MLP; of an embedding that is split.
    assert collectives == ["all-reduce"] * (3 if info.vocab_size % num_devices == 0 else 2)


def test_int8_weights_are_shared_out_too(tmp_path):
    """Scales are of whole rows, also where devices have parts of each row."""
    info = write_checkpoint(tmp_path, num_kv_heads=4)
    want_logits, want_tokens, _ = run_steps(info, make_mesh(DEVICES[:1]), "int8")
    got_logits, got_tokens, _ = run_steps(info, make_mesh(DEVICES[:4]), "int8")
    for got, want in zip(got_logits, want_logits, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2 * tiny.LOGITS_TOLERANCE)
    assert got_tokens == want_tokens


def test_each_device_has_its_share(tmp_path):
    info = write_checkpoint(tmp_path, num_kv_heads=4)
    one, four = (
        (param_shapes(info, jnp.float32, mesh), shapes_of(spec_of(info, mesh)).step.kv_cache)
        for mesh in (make_mesh(DEVICES[:1]), make_mesh(DEVICES[:4]))
    )
    assert device_bytes(one[1]) == 4 * device_bytes(four[1])
    norms = 4 * info.hidden_size * (2 * info.num_layers + 1)
    assert device_bytes(one[0]) - norms == 4 * (device_bytes(four[0]) - norms)


# --- every program -------------------------------------------------------------------------------


def runner_of(info: ModelInfo, mesh: Mesh) -> ModelRunner:
    spec, buckets = spec_of(info, mesh), (tiny.SMALL,)
    options = OptionSpec(info.vocab_size, tiny.OPTIONS.processors)
    shapes, params = shapes_of(spec), load_params(info, jnp.float32, mesh)
    jobs = programs.forward_jobs(spec, buckets, params, shapes.step)
    jobs |= programs.small_jobs(spec, options, (5, info.vocab_size), params, shapes)
    made = programs.join_programs({key: job() for key, job in jobs.items()})
    state = programs.empty_state(shapes)
    return ModelRunner(made, params, state, options, tiny.BLOCKS_PER_ROW)


def test_options_scores_and_pooling_are_those_of_one_device(tmp_path):
    """Through the model runner, which also runs each program on nothing first."""
    info = write_checkpoint(tmp_path, num_heads=8)
    requests = {
        0: SamplingParams(
            max_tokens=9,
            temperature=0.0,
            presence_penalty=1.0,
            logit_bias=((5, 3.0), (63, 2.0)),
            bad_words=((7,), (5, 6)),
            logits_processors=(("scale", (1.5,)),),
            logprobs=3,
            prompt_logprobs=-1,
            logprob_token_ids=(1, 62),
        ),
        1: replace(SEEDED, allowed_token_ids=tuple(range(10, 60)), logprobs=-1),
        2: SamplingParams(max_tokens=9, temperature=0.0, pooling="mean", min_tokens=4),
    }
    outputs = []
    for mesh in (make_mesh(DEVICES[:1]), make_mesh(DEVICES[:4])):
        runner = runner_of(info, mesh)
        runner.warm_up()
        planner = tiny.Planner()
        for row, sampling in requests.items():
            planner.admit(row, tiny.prompt(2 + row), sampling)
        plans = [planner.plan({0: 2, 1: 3, 2: 3})[0], planner.plan({2: 1})[0]]
        plans += [planner.plan()[0] for _ in range(4)]
        for plan in plans:
            runner.execute(plan)
        outputs.append([runner.collect() for _ in plans])
        assert outputs[-1][-1].num_compiles == 0
    assert any(output.extras for output in outputs[0])
    for one, four in zip(*outputs, strict=True):
        assert four.sampled_token_ids == one.sampled_token_ids
        assert [r.row for r in four.extras] == [r.row for r in one.extras]
        for got, want in zip(four.extras, one.extras, strict=True):
            for name in ("logprobs", "prompt_logprobs"):
                compare_scores(getattr(got, name), getattr(want, name))
            if want.embedding is not None:
                vectors = [np.frombuffer(r.embedding, "<f4") for r in (got, want)]
                np.testing.assert_allclose(*vectors, rtol=0, atol=2 * tiny.LOGITS_TOLERANCE)


def compare_scores(got: TokenLogprobs | None, want: TokenLogprobs | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    assert (got.ranks, got.top_ids) == (want.ranks, want.top_ids)
    for name in ("logprobs", "top_logprobs", "chosen_logprobs"):
        values = [np.frombuffer(getattr(scores, name), "<f4") for scores in (got, want)]
        np.testing.assert_allclose(*values, rtol=0, atol=4 * tiny.LOGITS_TOLERANCE)
