"""What depends on devices: defaults and their reasons, attention, and how many KV blocks fit."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, replace
from jaxserve.errors import UserError
from jaxserve.worker import programs, sizing, warmup, worker
from jaxserve.worker.sizing import KVBlocks, resolve_for_device, size_kv_cache
from jaxserve.worker.weights import param_shapes
from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import AUTO_ORDER, reference, xla
from tests.native import IN_C
from tests.worker import tiny
from tests.worker.tiny import INFO

GIB = 2**30
CONFIG = replace(
    EngineConfig(),
    info=INFO,
    dtype="float32",
    max_model_len=32,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_num_mixed_tokens=16,
    jump_ahead_tokens=8,
    num_hosts=1,
)
BLOCK_BYTES = 2 * INFO.num_layers * 4 * INFO.num_kv_heads * INFO.head_dim * 4  # K and V
NEEDED = 32 // 4 + 1  # a longest sequence, and the null block


def fake_device(platform: str, stats: dict[str, int] | None = None) -> jax.Device:
    """Passes for a device; there is none of most platforms where tests run."""
    device = mock.Mock(spec=jax.Device)
    device.platform = platform
    device.device_kind = platform
    device.process_index = 0
    device.memory_stats.return_value = stats
    return device


# --- limits, types, attention --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "name"), [("cpu", "cpu"), ("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu")]
)
def test_every_platform_has_defaults_that_are_logged_with_a_reason(platform, name, caplog):
    config = replace(EngineConfig(), info=INFO, max_model_len=32)
    with caplog.at_level(logging.INFO, sizing.__name__):
        resolved = resolve_for_device(config, fake_device(platform))
    assert resolved.model.dtype == "bfloat16"
    derived = {
        "dtype": resolved.model.dtype,
        "block_size": resolved.cache.block_size,
        "max_num_seqs": resolved.scheduler.max_num_seqs,
        "max_num_batched_tokens": resolved.scheduler.max_num_batched_tokens,
        "attention": resolved.worker.attention,
    }
    assert 0 not in derived.values() and derived["attention"] in AUTO_ORDER[name]
    assert derived["max_num_batched_tokens"] >= derived["max_num_seqs"]
    for field, value in derived.items():
        line = next(r.message for r in caplog.records if r.message.startswith(f"{field} = "))
        assert re.fullmatch(rf"{field} = {value}( \(.*\))?: .*\w+.*", line)
    assert f"dtype = bfloat16: default on {name}, " in caplog.text
    assert sizing.smallest_bucket(name) > 0
    assert sizing.platform_of(fake_device(platform)) == name


@pytest.mark.parametrize(("dtype", "num_tokens"), [("bfloat16", 112), ("float32", 64)])
def test_a_cpu_that_multiplies_tiles_takes_more_of_a_prompt_at_once(monkeypatch, dtype, num_tokens):
    monkeypatch.setattr(sizing, "has_tiles", lambda: True)
    config = replace(CONFIG, dtype=dtype, max_num_mixed_tokens=0)
    scheduler = sizing.resolve_for_device(config, fake_device("cpu")).scheduler
    assert scheduler.max_num_mixed_tokens == num_tokens
    monkeypatch.setattr(sizing, "has_tiles", lambda: False)
    scheduler = sizing.resolve_for_device(config, fake_device("cpu")).scheduler
    assert scheduler.max_num_mixed_tokens == 64


def test_what_is_given_is_kept(caplog):
    with caplog.at_level(logging.INFO, sizing.__name__):
        given = replace(CONFIG, attention="reference", matmul="xla")
        resolved = resolve_for_device(given, fake_device("cpu"))
    assert resolved == given
    assert caplog.records == []
    only_rows = replace(EngineConfig(), info=INFO, max_model_len=32, max_num_seqs=5000)
    resolved = resolve_for_device(only_rows, fake_device("cuda"))
    assert resolved.scheduler.max_num_batched_tokens == 5000


def test_few_tokens_derive_few_rows():
    config = replace(CONFIG, max_num_seqs=0, max_num_batched_tokens=16)
    assert resolve_for_device(config, fake_device("cpu")).scheduler.max_num_seqs == 16


def test_fewer_tokens_than_rows_is_refused_with_a_number_that_works():
    config = replace(CONFIG, max_num_seqs=48, max_num_batched_tokens=16)
    with pytest.raises(UserError) as caught:
        resolve_for_device(config, fake_device("cpu"))
    assert "--max-num-batched-tokens 16 is less than --max-num-seqs" in caught.value.problem
    resolve_for_device(apply_fix(config, caught.value), fake_device("cpu"))


def test_int8_is_refused_where_it_would_be_written_anew():
    config = replace(CONFIG, quantization="int8")
    with pytest.raises(UserError) as caught:
        resolve_for_device(config, fake_device("cuda"))
    assert caught.value.problem.startswith(
        "--quantization int8 is for CPUs: the compiler for a gpu"
    )
    assert caught.value.fix == "Leave --quantization out."


def test_matmul_by_name_is_used_or_refused_with_the_reason(monkeypatch, caplog):
    device, config = fake_device("cpu"), replace(CONFIG, dtype="bfloat16")
    with caplog.at_level(logging.INFO, sizing.__name__):
        assert resolve_for_device(config, device).worker.matmul == IN_C
    assert f"matmul = {IN_C}" in caplog.text
    for name in {IN_C, "xla"}:
        assert resolve_for_device(replace(config, matmul=name), device).worker.matmul == name
    in_float32 = replace(CONFIG, dtype="float32")
    assert resolve_for_device(in_float32, device).worker.matmul == "xla"
    in_int8 = replace(in_float32, quantization="int8")
    assert resolve_for_device(in_int8, device).worker.matmul == IN_C
    assert ("int8 are slower" in caplog.text) == (IN_C == "xla")
    resolve_for_device(replace(in_int8, mesh="1x2"), device)
    assert "int8 are slower" in caplog.text
    assert resolve_for_device(replace(config, mesh="1x2"), device).worker.matmul == "xla"
    with pytest.raises(UserError) as caught:
        resolve_for_device(replace(config, matmul="cpu"), fake_device("cuda"))
    assert caught.value.problem == "--matmul cpu: runs on CPUs."
    assert "--matmul auto" in caught.value.fix
    assert resolve_for_device(config, fake_device("cuda")).worker.matmul == "xla"


def test_attention_by_name_is_used_or_refused_with_the_reason(monkeypatch, caplog):
    device = fake_device("cpu")
    for name in ("xla", "reference"):
        assert resolve_for_device(replace(CONFIG, attention=name), device).worker.attention == name
    with pytest.raises(UserError) as caught:
        resolve_for_device(replace(CONFIG, attention="magic"), device)
    assert "--attention magic: there is no such implementation" in caught.value.problem
    with pytest.raises(UserError, match="wants heads of a multiple of 16, not of 8"):
        resolve_for_device(replace(CONFIG, attention="cpu"), device)
    assert "--attention auto" in caught.value.fix

    monkeypatch.setattr(xla, "unsupported_reason", lambda call: "the moon is full")
    with pytest.raises(UserError) as caught:
        resolve_for_device(replace(CONFIG, attention="xla"), device)
    assert caught.value.problem == "--attention xla: the moon is full."
    with caplog.at_level(logging.INFO, sizing.__name__):
        assert resolve_for_device(CONFIG, device).worker.attention == "reference"
    assert "attention = reference (" in caplog.text
    assert "xla refused: the moon is full)" in caplog.text

    monkeypatch.setattr(reference, "unsupported_reason", lambda call: "so it is")
    with pytest.raises(AssertionError, match="reference refused: so it is"):
        resolve_for_device(CONFIG, device)


def test_the_attention_call_is_the_models():
    call = sizing.attention_call(replace(CONFIG, dtype="bfloat16"), CHIPS["v6e"])
    assert call.chip == CHIPS["v6e"]
    assert (call.num_heads, call.q_dtype) == (INFO.num_heads, "bfloat16")
    layout = call.layout
    assert (layout.platform, layout.dtype, layout.page_size) == ("tpu", "bfloat16", 4)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 2, 8)


# --- memory --------------------------------------------------------------------------------------


def test_a_device_that_counts_its_memory_is_believed():
    stats = {"bytes_limit": 80 * GIB, "bytes_in_use": 3 * GIB}
    assert sizing.memory_limit_bytes([fake_device("cuda", stats)]) == 77 * GIB


@pytest.mark.parametrize(
    ("stats", "limit", "expected"),
    [
        (None, None, 10 * GIB),  # no container
        (None, "max", 10 * GIB),
        ({"bytes_in_use": 5}, f"{4 * GIB}\n", 3 * GIB),  # 1 GiB of 4 is in use
        (None, f"{64 * GIB}", 10 * GIB),
    ],
)
def test_a_host_gives_what_is_free_within_its_container(
    stats, limit, expected, tmp_path: Path, monkeypatch
):
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(limit)
    monkeypatch.setattr(sizing, "_CGROUP_LIMIT", path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=GIB))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert sizing.memory_limit_bytes([fake_device("cpu", stats)]) == expected


# --- KV blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "expected"), [(32, 4, 8), (33, 4, 9), (1, 4, 1), (32, 32, 1)]
)
def test_blocks_per_sequence(num_tokens, block_size, expected):
    config = replace(CONFIG, max_model_len=num_tokens, block_size=block_size)
    assert sizing.blocks_per_sequence(config) == expected


@pytest.mark.parametrize(
    ("changes", "platform", "free_blocks", "temp_blocks", "count", "depends", "reason"),
    [
        ({}, "gpu", 100, 0, 90, True, "free x 0.9"),
        ({}, "gpu", 100, 20, 70, True, "for the largest step"),
        ({"memory_utilization": 1.0}, "gpu", 100, 20, 80, True, "free x 1.0"),
        ({"num_kv_blocks": 50}, "gpu", 100, 20, 50, False, "--num-kv-blocks"),
        ({"num_kv_blocks": 80}, "gpu", 100, 20, 80, False, "--num-kv-blocks"),  # all there is
        (
            {"kv_cache_memory_bytes": 30 * BLOCK_BYTES},
            "gpu",
            100,
            20,
            30,
            False,
            "--kv-cache-memory-bytes",
        ),
        (
            {"kv_cache_memory_bytes": 31 * BLOCK_BYTES - 1},
            "cpu",
            100,
            0,
            30,
            False,
            "--kv-cache-memory-bytes",
        ),
        ({}, "cpu", 100, 20, 70, True, "for the largest step"),  # less than 2 GiB is free
        (
            {},
            "cpu",
            10 * GIB // BLOCK_BYTES,
            5,
            2 * GIB // BLOCK_BYTES,
            False,
            "2.00 GiB, the default",
        ),
        ({}, "gpu", NEEDED, 0, None, None, None),
        ({"memory_utilization": 1.0}, "gpu", NEEDED, 0, NEEDED, True, "free x 1.0"),
        ({"num_kv_blocks": NEEDED}, "gpu", NEEDED, 0, NEEDED, False, "--num-kv-blocks"),
    ],
)
def test_number_of_blocks(changes, platform, free_blocks, temp_blocks, count, depends, reason):
    def size() -> KVBlocks:
        return size_kv_cache(
            replace(CONFIG, **changes),
            platform,
            free_blocks * BLOCK_BYTES,
            step_temp_bytes=temp_blocks * BLOCK_BYTES,
        )

    if count is None:
        with pytest.raises(UserError, match="--max-model-len 32 needs 9 KV blocks"):
            size()
        return
    blocks = size()
    assert (blocks.count, blocks.depends_on_step) == (count, depends)
    assert blocks.bytes_per_block == BLOCK_BYTES
    assert reason in blocks.reason


def apply_fix(config: EngineConfig, error: UserError) -> EngineConfig | None:
    """The config with the flags that the error's fix names; None where it names none."""
    flags = re.findall(r"--([a-z-]+) (\d+)", error.fix)
    return replace(config, **{n.replace("-", "_"): int(v) for n, v in flags}) if flags else None


@pytest.mark.parametrize(
    ("changes", "free_blocks", "flag"),
    [
        ({"num_kv_blocks": 4}, 100, "--max-model-len 12,"),
        ({"num_kv_blocks": 101}, 100, "--num-kv-blocks 100 or less"),
        ({"kv_cache_memory_bytes": 5 * BLOCK_BYTES + 1}, 100, "--max-model-len 16,"),
        ({"kv_cache_memory_bytes": 55 * BLOCK_BYTES}, 60, "--kv-cache-memory-bytes 55296 or less"),
        ({}, 5, "--max-model-len 12,"),
        ({}, 2, "Give the KV cache more memory"),
        ({}, 0, "Give the KV cache more memory"),
        ({"num_kv_blocks": 1}, 100, "Use --num-kv-blocks 9"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_number_that_does(changes, free_blocks, flag):
    config = replace(CONFIG, **changes)
    with pytest.raises(UserError) as caught:
        size_kv_cache(config, "gpu", free_blocks * BLOCK_BYTES, 0)
    assert flag in caught.value.fix
    fixed = apply_fix(config, caught.value)
    if fixed is not None:
        size_kv_cache(fixed, "gpu", free_blocks * BLOCK_BYTES, 0)


@pytest.mark.parametrize(
    "changes", [{"num_kv_blocks": 50}, {"kv_cache_memory_bytes": 50 * BLOCK_BYTES}], ids=str
)
def test_the_fix_works_when_both_the_sequence_and_the_blocks_are_too_many(changes):
    """There is room for 5 blocks: neither for the 9 of a sequence, nor for the 50 asked for."""
    config = replace(CONFIG, **changes)
    with pytest.raises(UserError) as caught:
        size_kv_cache(config, "gpu", 5 * BLOCK_BYTES, 0)
    size_kv_cache(apply_fix(config, caught.value), "gpu", 5 * BLOCK_BYTES, 0)


quantities = st.integers(0, 60).map(lambda n: n * BLOCK_BYTES // 2)


@settings(max_examples=150, deadline=None)
@given(
    free_bytes=quantities,
    temp_bytes=quantities,
    # Either is given, or neither.
    asked=st.one_of(
        st.just((0, 0)),
        st.tuples(quantities, st.just(0)),
        st.tuples(st.just(0), st.integers(1, 40)),
    ),
    max_model_len=st.integers(2, 100),
    utilization=st.sampled_from([0.5, 1.0]),
    platform=st.sampled_from(["cpu", "gpu"]),
)
def test_what_is_promised_fits(
    free_bytes,
    temp_bytes,
    asked,
    max_model_len,
    utilization,
    platform,
):
    memory, num_blocks = asked
    config = replace(
        CONFIG,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=memory,
        num_kv_blocks=num_blocks,
        memory_utilization=utilization,
    )
    try:
        blocks = size_kv_cache(config, platform, free_bytes, temp_bytes)
    except UserError as error:
        fixed = apply_fix(config, error)
        if fixed is None:
            return
        blocks = size_kv_cache(fixed, platform, free_bytes, temp_bytes)
        config = fixed
    assert blocks.count >= sizing.blocks_per_sequence(config) + 1
    assert blocks.count * BLOCK_BYTES + temp_bytes <= free_bytes
    if num_blocks:
        assert blocks.count == config.cache.num_kv_blocks
    elif memory:
        assert blocks.count * BLOCK_BYTES <= memory


# Of the worker below, beside the KV cache: lines of the table, of options and of counts, masks,
# hidden states of a step, pooled sums.
OPTION_WORDS = 1 + 2 + 2 * 1024 + 128 * 8 + 7 + 3
STATE_BYTES = 4 * (4 * (42 + 8) + 4 * OPTION_WORDS + 4 * 64 + 4 * 2 + 16 * 32 + 4 * 32)
CPU_BLOCKS = 2 * GIB // BLOCK_BYTES  # the most that a CPU's cache has, unless told


@pytest.mark.parametrize(
    ("platform", "changes", "free_blocks", "temp_blocks", "count"),
    [
        ("cuda", {}, 100, 20, 70),
        ("cuda", {"num_kv_blocks": 50}, 100, 20, 50),
        ("cuda", {"num_kv_blocks": 90}, 100, 20, "refused"),
        ("cuda", {"kv_cache_memory_bytes": 30 * BLOCK_BYTES}, 100, 20, 30),
        ("cuda", {}, 20, 12, "refused"),
        ("cpu", {}, 2 * CPU_BLOCKS, 100, CPU_BLOCKS),
        # There is room until the step takes its part: refused or cut.
        ("cuda", {"kv_cache_memory_bytes": 50 * BLOCK_BYTES}, 60, 20, None),
        ("cpu", {}, CPU_BLOCKS * 10 // 8, CPU_BLOCKS // 2, None),
    ],
    ids=str,
)
def test_a_worker_takes_no_more_than_its_step_leaves_free(
    platform, changes, free_blocks, temp_blocks, count, monkeypatch
):
    """The worker's own order of sizing and compiling; nothing is read, compiled or allocated."""
    param_bytes = sum(p.size * 4 for p in param_shapes(INFO, jnp.float32, tiny.SPEC.mesh).values())
    limit = param_bytes + free_blocks * BLOCK_BYTES + STATE_BYTES
    device = fake_device(platform, {"bytes_limit": limit, "bytes_in_use": 0})
    program = mock.Mock(spec=jax.stages.Compiled)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(warmup, "use_compilation_cache", lambda _: None)
    monkeypatch.setattr(warmup, "run_parallel", lambda jobs, store: dict.fromkeys(jobs, program))
    result_bytes = BLOCK_BYTES // 16  # of each of 8 kinds of program, in two steps in flight
    monkeypatch.setattr(programs, "result_bytes", lambda _: result_bytes)
    monkeypatch.setattr(programs, "temp_bytes", lambda _: (temp_blocks - 1) * BLOCK_BYTES)
    monkeypatch.setattr(worker, "empty_state", mock.Mock(side_effect=lambda shapes: shapes))
    for name in ("load_params", "ModelRunner", "ProgramStore"):
        monkeypatch.setattr(worker, name, mock.Mock())
    config = replace(CONFIG, served_model_name="tiny", **changes)
    try:
        num_blocks = worker.Worker(config).load().cache.num_kv_blocks
    except UserError:
        assert count in ("refused", None)
        return
    state_shapes = worker.empty_state.call_args.args[0]
    assert state_shapes.step.kv_cache.k.shape[1] == num_blocks
    leaves = jax.tree.leaves(state_shapes)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert state_bytes - num_blocks * BLOCK_BYTES == STATE_BYTES
    assert param_bytes + state_bytes + temp_blocks * BLOCK_BYTES <= limit
    assert count in (num_blocks, None)
