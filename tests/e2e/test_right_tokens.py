"""Greedy tokens and first logits against goldens that transformers made in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig, replace
from jaxserve.messages import AdmittedRow, SamplingParams, SchedulerOutput
from jaxserve.worker import sizing
from jaxserve.worker.batch_mirror import BatchMirror
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.programs import compile_forward, empty_state, state_shapes
from jaxserve.worker.sharding import make_mesh
from jaxserve.worker.step import StepSpec
from jaxserve.worker.weights import load_params
from tests.e2e.engine import GOLDENS
from tests.native import needs_tiles

NUM_TOKENS = 64
TIE = 1e-3  # two logits this close may change places between implementations


@pytest.fixture(scope="module")
def greedy_outputs(make_engine):
    """All 20 prompts through the engine together."""
    prompts = [golden["prompt_ids"] for golden in GOLDENS["prompts"]]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    return make_engine().generate(prompts, [sampling] * len(prompts))


@pytest.mark.parametrize("idx", range(20), ids=[g["name"] for g in GOLDENS["prompts"]])
def test_greedy_tokens(greedy_outputs, idx):
    golden, output = GOLDENS["prompts"][idx], greedy_outputs[idx]
    assert len(output) == NUM_TOKENS
    for i, (got, wanted) in enumerate(zip(output, golden["output_ids"], strict=True)):
        if got != wanted:
            first, second = golden["top2_logits"][i]
            is_tie = got in golden["top2_ids"][i] and first - second < TIE
            assert is_tie, f"token {i}: {got}, not {wanted}; top two {first} and {second}"
            return  # from here on the texts may differ


def make_forwards(
    config: EngineConfig, quantization: str, *buckets: Bucket
) -> list[Callable[[list[int]], np.ndarray]]:
    """The forwards of buckets, each as what gives the logits after a prompt."""
    config = replace(config, num_kv_blocks=64)
    mesh, dtype = make_mesh(jax.local_devices()[:1]), jnp.dtype(config.model.dtype)
    layout, chip = sizing.kv_cache_layout(config, "cpu"), sizing.chip_of_device(mesh.devices.item())
    names, most = (config.worker.attention, "auto"), max(b.num_tokens for b in buckets)
    spec = StepSpec(config.info, layout, chip, *names, dtype, most, mesh)
    max_blocks = sizing.blocks_per_sequence(config)
    shapes = state_shapes(spec, 4, max_blocks, 64)
    params = load_params(config.info, dtype, mesh, quantization)

    def make(bucket: Bucket) -> Callable[[list[int]], np.ndarray]:
        forward = compile_forward(spec, bucket, params, shapes)
        state = empty_state(shapes)

        def logits_of(prompt: list[int]) -> np.ndarray:
            nonlocal state
            sampling = SamplingParams(max_tokens=1, temperature=0)
            admitted = AdmittedRow(1, prompt, len(prompt), 0, [1, 2, 3, 4], sampling)
            plan = SchedulerOutput(0, admitted=[admitted], num_tokens=[1, len(prompt)])
            buffer = np.empty(bucket.delta_len, np.int32)
            BatchMirror(4, max_blocks).apply(plan).fill(buffer, bucket, 4)
            logits, _, state = forward(params, state, jnp.asarray(buffer))
            return np.asarray(logits)[0]

        return logits_of

    return [make(bucket) for bucket in buckets]


@needs_tiles
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_runs_beside_a_request_does_not_change_its_logits(demo_worker, quantization):
    """Bit for bit, by whichever program."""
    _, config = demo_worker
    config = replace(config, dtype="bfloat16")
    sizes = (sizing.TINY_BUCKET, sizing.smallest_bucket("cpu"), 32)
    buckets = [Bucket(size, size, 128) for size in sizes]
    alone, *others = make_forwards(config, quantization, *buckets)
    for golden in GOLDENS["prompts"]:
        prompt = golden["prompt_ids"][-2:]
        for other in others:
            np.testing.assert_array_equal(other(prompt), alone(prompt))


# One sigma of a logit's error, relative to the largest logit.
# float32: each of 60 residual additions and each product of D = 576 inputs rounds at 2^-24:
# 2^-24 * sqrt(60) * sqrt(576) ~ 1e-5.
# bfloat16: weight, input and residual of each of 60 blocks round at 2^-9, and products accumulate
# in float32: 2^-9 * sqrt(3 * 60) ~ 0.026.
# int8: a weight is off by up to 1 / 254 of the largest of its channel, 1 / 440 of it in the mean,
# and the largest is about three usual ones: 3 / 440 * sqrt(60) ~ 0.053.
# The worst of 96 logits lies within 2.5 sigma.
@pytest.mark.parametrize(
    ("dtype", "quantization", "sigma"),
    [("float32", "none", 1e-5), ("bfloat16", "none", 0.026), ("bfloat16", "int8", 0.053)],
)
def test_first_logits(demo_worker, dtype, quantization, sigma):
    _, config = demo_worker
    bucket = Bucket(num_tokens=64, num_rows=2, num_writes=128)
    (logits_of,) = make_forwards(replace(config, dtype=dtype), quantization, bucket)
    checked = 0
    for golden in GOLDENS["prompts"]:
        prompt = golden["prompt_ids"]
        if len(prompt) > bucket.num_tokens:
            continue
        logits = logits_of(prompt)
        first = golden["first_logits"]
        ids = first["top_ids"] + GOLDENS["probe_ids"]
        wanted = np.array(first["top_values"] + first["probe_values"])
        errors = np.abs(logits[ids] - wanted) / np.abs(wanted).max()
        assert errors.max() < 2.5 * sigma, golden["name"]
        assert np.sqrt(np.mean(errors**2)) < sigma, golden["name"]
        checked += 1
    assert checked == 19
