#!/usr/bin/env python3
"""What the GPU kernels do on a GPU: numbers, speed, tokens/s of a random 8B model.

    python scripts/gpu_session.py [--limit 355] [--parts numbers,decode,prefill]
    python scripts/gpu_session.py --smoke      tiny shapes, plain JAX in place of the kernels: a CPU

Needs an NVIDIA driver, jax[cuda12] or jax[cuda13] from 0.11.2 on, jaxtyping and the files of this
repository. Beside those `numbers` needs hypothesis and pytest, `matmuls` msgspec, and `serve` that,
llguidance, gguf, tokenizers, jinja2, prometheus-client, psutil, tqdm, pyyaml and safetensors. What
is missing is printed first; a part that cannot run says why, and the others run.

Every part is a process with a time limit of its own and prints JSON lines, each as soon as its
figure is known, so that a part that is cut off loses what it had not measured and nothing else.
Exit code 1 when a part failed, was cut off or found wrong numbers.

Rates: `decode` is live K and V bytes a second over the bandwidth of a device copy (bytes read and
written); `prefill` is the operations of causal attention a second over those of a matmul. On a
Hopper both prefill kernels are checked and timed: wgmma, which it takes, and mma.sync, which other
cards take. `tune` gives every size of decode that fits; `matmuls` all of a step but attention, its
products by cuBLAS and by XLA's own kernels (Triton), weights once from memory.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import ModelInfo
    from pallas_kernels.chips import Chip
    from pallas_kernels.ragged_paged_attention import KVCache, KVCacheLayout

ROOT = Path(__file__).resolve().parent.parent
_NEEDED = (
    "jax jaxlib jaxtyping numpy ml_dtypes hypothesis pytest msgspec llguidance gguf tokenizers "
)
_NEEDED += "jinja2 prometheus_client psutil tqdm yaml safetensors"
# Seconds each part may take, all of them less than six minutes. A shared CPU gets ten times that.
_LIMITS = {"environment": 25, "numbers": 75, "decode": 40, "prefill": 45, "serve": 95}
_LIMITS |= {"tune": 35, "matmuls": 40}
_TUNE_S = 18  # after which no further sizes are begun


def emit(**figures: Any) -> None:
    """One JSON line; numbers with four digits."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(rounded), flush=True)


# --- environment ---------------------------------------------------------------------------------


def environment(smoke: bool) -> None:
    """Versions, devices, what is missing."""
    del smoke
    missing = [name for name in _NEEDED.split() if importlib.util.find_spec(name) is None]
    emit(part="environment", python=sys.version.split()[0], missing=missing)
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12")
    versions = {}
    for name in (*names, "nvidia-cudnn-cu13"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    emit(part="environment", versions=versions)
    import jax

    from pallas_kernels.ragged_paged_attention import explain
    from pallas_kernels.ragged_paged_attention.specs import MODEL_SHAPES

    chip = _chip()
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    emit(part="environment", device=device.device_kind, chip=chip.name, memory_bytes=memory)
    emit(part="environment", attention=str(explain(MODEL_SHAPES["Llama-3-8B"].call(chip))))


def _chip() -> "Chip":
    import jax

    from pallas_kernels.chips import chip_of

    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    return chip_of(device.platform, device.device_kind, capability)


def _ours(smoke: bool) -> str:
    """The implementation under test."""
    return "xla" if smoke else "gpu"


@contextlib.contextmanager
def _by_mma() -> Iterator[None]:
    """What is traced inside prefills by mma.sync, also where it would by wgmma."""
    from pallas_kernels.ragged_paged_attention import gpu_prefill, gpu_prefill_mma

    kernel_for = gpu_prefill._kernel_for
    gpu_prefill._kernel_for = lambda call: gpu_prefill_mma
    try:
        yield
    finally:
        gpu_prefill._kernel_for = kernel_for


def _is_hopper() -> bool:
    return _chip().capability == (9, 0)


# --- numbers -------------------------------------------------------------------------------------


def numbers(smoke: bool) -> bool:
    """Long contexts against the reference; the cases of the tests, by the tests' oracle and its
    derived tolerance."""
    from tests.kernels import harness
    from tests.kernels.cases import CONFIGS, SIMULATED_CONFIGS

    harness.SIMULATORS.clear()  # here is the device itself
    # Every config, those that tests simulate first.
    configs = {"mha": CONFIGS["mha"]} if smoke else SIMULATED_CONFIGS | CONFIGS
    is_right = _against_reference(smoke, by_mma=False)
    is_right &= all([_by_oracle(name, config, smoke) for name, config in configs.items()])
    if _is_hopper():
        with _by_mma():
            is_right &= _against_reference(smoke, by_mma=True)
            harness._compiled.cache_clear()
            for name, config in SIMULATED_CONFIGS.items():
                is_right &= _by_oracle(name, config, smoke, by_mma=True)
    return is_right


def _by_oracle(name: str, config: Any, smoke: bool, by_mma: bool = False) -> bool:
    """The edge cases of one config."""
    import dataclasses

    from pallas_kernels.dispatch import UnsupportedError
    from tests.kernels import harness
    from tests.kernels.cases import edge_plans, make_case

    config = dataclasses.replace(config, chip=_chip().name)
    problems = {}
    plans = edge_plans(config)
    for seed, plan_name in enumerate(list(plans)[1:3] if smoke else plans):
        case = make_case(config, plans[plan_name], seed)
        try:
            harness.check(case, case.expected(), harness.run(_ours(smoke), case))
        except UnsupportedError as error:
            emit(part="numbers", config=name, refused=str(error))
            return True
        except Exception as error:  # whatever it is, the other cases are still of interest
            problems[plan_name] = f"{type(error).__name__}: {error}"[:300]
    emit(part="numbers", config=name, by_mma=by_mma, problems=problems)
    return not problems


def _against_reference(smoke: bool, by_mma: bool) -> bool:
    """bfloat16, contexts of several thousand tokens, decode and prefill rows in one call."""
    import jax
    import numpy as np

    layout = _layout(num_layers=1, smoke=smoke)
    q_lens = [1, 1, 5, 16] if smoke else [1, 1, 1, 17, 700, 1300]
    kv_lens = [3, 60, 40, 16] if smoke else [5, 4097, 8000, 3000, 700, 6500]
    arrays = _arrays(layout, q_lens, kv_lens, num_heads=4 * layout.num_kv_heads)
    ours, right = (
        np.asarray(jax.jit(_step(layout, name))(*arrays)[0], np.float32)
        for name in (_ours(smoke), "reference")
    )
    # Each rounds its weights and its output to bfloat16: 2^-9 of |V|, here below 6, and of the
    # output, in each of the two; float32 sums are far below that.
    error, tolerance = float(np.abs(ours - right).max()), 4 * 2**-9 * 6
    is_right = bool(np.isfinite(ours).all() and error <= tolerance)
    figures = {"max_error": error, "tolerance": tolerance, "is_right": is_right}
    emit(part="numbers", config="long", by_mma=by_mma, **figures)
    return is_right


def _layout(num_layers: int, smoke: bool) -> "KVCacheLayout":
    """Llama-3-8B's heads."""
    from pallas_kernels.ragged_paged_attention import KVCacheLayout

    heads = (2, 64, "bfloat16", 8) if smoke else (8, 128, "bfloat16", 128)
    return KVCacheLayout.for_platform(_chip().platform, num_layers, *heads)


def _arrays(
    layout: "KVCacheLayout", q_lens: list[int], kv_lens: list[int], num_heads: int
) -> tuple[Any, ...]:
    """Random arguments in the op's order, made on the device; pages in random order."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.ragged_paged_attention import KVCache

    def normal(seed: int, *shape: int) -> Any:
        make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
        return make(jax.random.key(seed))

    per_row = -(-max(kv_lens) // layout.page_size)
    shape = layout.shape(1 + per_row * len(kv_lens)).k.shape
    pages = np.random.default_rng(0).permutation(per_row * len(kv_lens)) + 1
    num_tokens = sum(q_lens)
    new = (num_tokens, layout.num_kv_heads, layout.head_dim)
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    return (
        normal(0, num_tokens, num_heads, layout.head_dim),
        *(normal(1, *new), normal(2, *new)),
        KVCache(normal(3, *shape), normal(4, *shape)),
        ints(pages.reshape(len(kv_lens), per_row)),
        ints(kv_lens),
        ints(np.cumsum([0, *q_lens])),
    )


def _step(layout: "KVCacheLayout", implementation: str, repeats: int = 1) -> Callable[..., Any]:
    """Every layer of the cache in turn, `repeats` times; each call's output is the next one's q."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.ragged_paged_attention import (
        AttentionCall,
        plan_attention,
        ragged_paged_attention,
    )

    chip = _chip()

    def step(
        q: Any, k: Any, v: Any, kv_cache: "KVCache", tables: Any, kv_lens: Any, cu_q_lens: Any
    ) -> Any:
        call = AttentionCall(layout, chip, q.shape[1], q.dtype)
        where = (tables, kv_lens, cu_q_lens, len(kv_lens))
        size = (len(q), layout.num_pages(kv_cache))
        plan = plan_attention(call, *size, *where, implementation=implementation)

        def one_layer(carry: Any, layer: Any) -> Any:
            q, kv_cache = carry
            return ragged_paged_attention(
                *(q, k, v, kv_cache, layer, *where),
                plan=plan,
                layout=layout,
                chip=chip,
                scale=layout.head_dim**-0.5,
                implementation=implementation,
            ), None

        layers = jnp.arange(repeats * layout.num_layers, dtype=jnp.int32) % layout.num_layers
        return jax.lax.scan(one_layer, (q, kv_cache), layers)[0]

    return step


# --- speed ---------------------------------------------------------------------------------------


def _seconds(call: Callable[[], Any], rounds: int = 5) -> float:
    """The shortest of some calls; the first one, which compiles, is not counted."""
    import jax

    jax.block_until_ready(call())
    times_s = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        jax.block_until_ready(call())
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def _repeated(fn: Callable[..., Any], repeats: int) -> Callable[..., Any]:
    """`fn` of (x, *others), called again and again with its own result as x."""
    import jax

    return jax.jit(lambda x, *others: jax.lax.fori_loop(0, repeats, lambda _, y: fn(y, *others), x))


def _attention_seconds(
    layout: "KVCacheLayout", arrays: tuple[Any, ...], implementation: str, repeats: int
) -> float:
    """Seconds of one call on one layer; the cache is donated and handed on."""
    import jax

    run = jax.jit(_step(layout, implementation, repeats), donate_argnums=3)
    q, k, v, kv_cache, *rest = arrays
    # The caller's cache stays.
    state = [jax.tree.map(lambda leaf: leaf + 0, kv_cache)]

    def call() -> Any:
        out, state[0] = run(q, k, v, state[0], *rest)
        return out

    return _seconds(call) / (repeats * layout.num_layers)


def decode(smoke: bool) -> None:
    """64 rows of 4,096 tokens with one new token each."""
    import jax
    import jax.numpy as jnp

    rows, context, num_layers, repeats = (2, 64, 2, 1) if smoke else (64, 4096, 4, 4)
    layout = _layout(num_layers, smoke)
    arrays = _arrays(layout, [1] * rows, [context] * rows, 4 * layout.num_kv_heads)
    cache = arrays[3]
    copied = _repeated(lambda x: -x, 4)
    copy_s = _seconds(lambda: copied(cache.k)) / 4
    copy_rate = 2 * cache.k.nbytes / copy_s
    emit(part="decode", what="device copy", bytes_per_s=copy_rate)

    token_bytes = 2 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    live_bytes = rows * context * token_bytes

    def report(what: str, seconds: float) -> None:
        rate = live_bytes / seconds
        share = rate / copy_rate
        emit(part="decode", what=what, seconds=seconds, bytes_per_s=rate, of_copy=share)

    for name in dict.fromkeys((_ours(smoke), "xla")):
        report(name, _attention_seconds(layout, arrays, name, repeats))
    q = arrays[0].reshape(rows, 1, -1, layout.head_dim)
    shape = (rows, context, layout.num_kv_heads, layout.head_dim)
    k, v = (leaf[0, 1:].reshape(-1)[: rows * context * shape[2] * shape[3]] for leaf in cache)
    lengths = jnp.full(rows, context, jnp.int32)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        key_value_seq_lengths=lengths,
        query_seq_lengths=jnp.ones(rows, jnp.int32),
        implementation="xla" if smoke else "cudnn",
    )
    run = _repeated(attend, repeats)
    report("cuDNN", _seconds(lambda: run(q, k.reshape(shape), v.reshape(shape))) / repeats)


def prefill(smoke: bool) -> None:
    """Two prompts of 4,096 tokens from their start."""
    import jax
    import jax.numpy as jnp

    rows, length, repeats, size = (2, 32, 1, 64) if smoke else (2, 4096, 16, 8192)
    layout = _layout(1, smoke)
    num_heads = 4 * layout.num_kv_heads
    arrays = _arrays(layout, [length] * rows, [length] * rows, num_heads)
    square = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
    matmul = _repeated(lambda x, y: x @ y, 8)
    matmul_rate = 8 * 2 * size**3 / _seconds(lambda: matmul(square, square))
    emit(part="prefill", what="matmul", flops_per_s=matmul_rate)

    flops = rows * 4 * num_heads * layout.head_dim * (length * (length + 1) // 2)

    def report(what: str, seconds: float) -> None:
        rate = flops / seconds
        share = rate / matmul_rate
        emit(part="prefill", what=what, seconds=seconds, flops_per_s=rate, of_matmul=share)

    ours = _ours(smoke)
    report(ours, _attention_seconds(layout, arrays, ours, repeats))
    if _is_hopper() or smoke:
        with _by_mma():
            report(f"{ours}, mma.sync", _attention_seconds(layout, arrays, ours, repeats))
    q, k, v = (a.reshape(rows, length, -1, layout.head_dim) for a in arrays[:3])
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="xla" if smoke else "cudnn"
    )
    run = _repeated(attend, repeats)
    report("cuDNN", _seconds(lambda: run(q, k, v)) / repeats)
    report("xla", _attention_seconds(layout, arrays, "xla", 1))


def tune(smoke: bool) -> None:
    """What scripts/tune.py would measure for decode of Llama-3-8B; the files stay as they are."""
    import dataclasses

    import jax
    import tune as tuning

    from pallas_kernels.tuning import forced_sizes

    chip, case = _chip(), tuning.CASES["Llama-3-8B, decode"]
    case = dataclasses.replace(case, page_size=64)  # the engine's
    if smoke:
        case = dataclasses.replace(case, num_heads=4, num_kv_heads=2, num_rows=2, kv_len=64)
    emit(part="tune", what="chosen", seconds=tuning.measure(chip, case, _ours(smoke)))
    tried = [{}] if smoke else tuning.gpu_candidates(chip, case)
    end_s = time.perf_counter() + _TUNE_S
    for sizes in reversed(tried):  # longer blocks first
        if time.perf_counter() > end_s:
            emit(part="tune", what="not tried", **sizes)
            continue
        try:
            with forced_sizes({"gpu_decode": sizes}):
                seconds = tuning.measure(chip, case, _ours(smoke))
            emit(part="tune", what="tried", seconds=seconds, **sizes)
        except jax.errors.JaxRuntimeError as error:
            emit(part="tune", what=f"does not run: {error}"[:300], **sizes)


def matmuls(smoke: bool) -> None:
    """Eight layers and the logits of a step of 64 and of 1,024 tokens, no attention in them."""
    import jax
    import jax.numpy as jnp

    from jaxserve.models import llama
    from pallas_kernels.ragged_paged_attention.rope import unpack_and_rotate

    info = _model(smoke, num_layers=8)
    params = _random_params(
        {
            name: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16)
            for name, spec in llama.param_specs(info).items()
        }
    )
    num_bytes = sum(x.nbytes for name, x in params.items() if name != "embed")

    def attend(qkv: Any, tables: Any, kv_cache: Any, layer: Any) -> Any:
        q, k, v = unpack_and_rotate(qkv, tables)
        return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), kv_cache

    no_cache: Any = ()

    def step(params: dict[str, Any], token_ids: Any) -> Any:
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        hidden, _ = llama.forward(params, info, token_ids, positions, no_cache, attend)
        return llama.logits(params, info, hidden[:64])

    for by_triton in (False, True):
        for num_tokens in (64, 1024):
            ids = jnp.arange(num_tokens, dtype=jnp.int32) % info.vocab_size
            run = jax.jit(step, compiler_options={"xla_gpu_enable_triton_gemm": by_triton})
            seconds = _seconds(functools.partial(run, params, ids))
            what, rate = "XLA's own" if by_triton else "cuBLAS", num_bytes / seconds
            figures = {"tokens": num_tokens, "seconds": seconds, "weight_bytes_per_s": rate}
            emit(part="matmuls", what=what, **figures)


# --- serve ---------------------------------------------------------------------------------------


def serve(smoke: bool) -> None:
    """Output tokens/s of the real engine core and worker, weights random, greedy, at 64 rows."""
    import tempfile

    from jaxserve.cli_flags import config_from_kwargs
    from jaxserve.config import resolve_for_model
    from jaxserve.worker import worker as worker_module

    worker_module.load_params = lambda *args: _random_params(worker_module.param_shapes(*args))
    info = _model(smoke, num_layers=2 if smoke else 32)
    rows, prompt_len, output_len, max_tokens = (4, 8, 8, 16) if smoke else (64, 512, 256, 1024)
    with tempfile.TemporaryDirectory() as directory:
        config = config_from_kwargs(
            model="random",
            executor="in_process",
            max_model_len=prompt_len + output_len,
            max_num_seqs=rows,
            max_num_batched_tokens=max_tokens,
            compilation_cache_dir=directory,
        )
        started_s = time.perf_counter()
        worker = worker_module.Worker(resolve_for_model(config, info))
        config = worker.load()
        emit(part="serve", what="ready", seconds=time.perf_counter() - started_s)
        for name, rate in _serve_rates(worker, config, prompt_len, output_len):
            emit(part="serve", what=name, rows=rows, output_tokens_per_s=rate)


def _model(smoke: bool, num_layers: int) -> "ModelInfo":
    """Llama-3-8B, or a tiny one, with so many layers."""
    from jaxserve.config import ModelInfo

    sizes = (64, 96, 4, 2, 16, 256) if smoke else (4096, 14336, 32, 8, 128, 128_256)
    names = "hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size"
    return ModelInfo(
        path="",
        format="safetensors",
        architecture="LlamaForCausalLM",
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        num_layers=num_layers,
        **dict(zip(names.split(), sizes, strict=True)),  # pyright: ignore[reportArgumentType]
    )


def _random_params(shapes: dict[str, Any]) -> dict[str, Any]:
    """Weights that keep activations near 1, made where they stay."""
    import jax

    params = {}
    for i, (name, shape) in enumerate(shapes.items()):
        scale = 1.0 if "norm" in name or name == "embed" else shape.shape[-1] ** -0.5
        make = jax.jit(
            lambda key, shape=shape, scale=scale: (
                scale * jax.random.normal(key, shape.shape, shape.dtype)
            ),
            out_shardings=shape.sharding,
        )
        params[name] = make(jax.random.key(i))
    return params


def _serve_rates(
    worker: Any, config: Any, prompt_len: int, output_len: int
) -> Iterator[tuple[str, float]]:
    """Twice: output tokens/s from the first token of the last request to the last of the first."""
    from jaxserve.engine.core import EngineCore
    from jaxserve.engine.executor.in_process import InProcessExecutor
    from jaxserve.messages import EngineCoreRequest, SamplingParams

    stamps: dict[str, list[float]] = {}

    def note(client_idx: int, message: Any) -> None:
        del client_idx
        for output in message.outputs:
            stamps[output.request_id] += [time.perf_counter()] * len(output.new_token_ids)

    executor = InProcessExecutor(config, lambda _: worker)
    executor._worker = worker  # it is loaded
    core = EngineCore(config, executor, note)
    params = SamplingParams(max_tokens=output_len, temperature=0)
    for name in ("first", "second"):
        stamps = {f"{name}-{row}": [] for row in range(config.scheduler.max_num_seqs)}
        for row, request_id in enumerate(stamps):
            prompt = [(len(name) * 7 + row * 131 + j * 17) % 251 for j in range(prompt_len)]
            request = EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=params,
                arrival_time_s=time.time(),
            )
            core.inputs.put(core.make_request(request))
        core.take_inputs()
        while core.has_work:
            core.step()
        assert all(len(times) == output_len for times in stamps.values())
        start_s = max(times[0] for times in stamps.values())
        end_s = min(times[-1] for times in stamps.values())
        num_tokens = sum(start_s < s <= end_s for times in stamps.values() for s in times)
        yield name, num_tokens / (end_s - start_s)
    core.shutdown()


# --- the session ---------------------------------------------------------------------------------


PARTS: dict[str, Callable[[bool], Any]] = {
    "environment": environment,
    "numbers": numbers,
    "decode": decode,
    "prefill": prefill,
    "serve": serve,
    "matmuls": matmuls,
    "tune": tune,
}


def run_part(name: str, smoke: bool, limit_s: float) -> bool:
    """Runs a part in a process of its own; whether it ended well in time."""
    command = [sys.executable, __file__, "--part", name, *(["--smoke"] if smoke else [])]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    started_s = time.perf_counter()
    try:
        env = os.environ | {"PYTHONPATH": path}
        code = subprocess.run(command, env=env, timeout=limit_s, check=False).returncode
        outcome = "done" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        outcome = f"cut off after {limit_s:.0f} s"
    emit(part=name, outcome=outcome, seconds=time.perf_counter() - started_s)
    return outcome == "done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, help="seconds for the whole session")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in plain JAX")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        sys.exit(PARTS[options.part](options.smoke) is False)
    scale = 10 if options.smoke else 1
    end_s = time.perf_counter() + (options.limit or scale * sum(_LIMITS.values()))
    ended_well = [
        run_part(name, options.smoke, min(scale * _LIMITS[name], end_s - time.perf_counter()))
        for name in options.parts.split(",")
        if time.perf_counter() < end_s
    ]
    sys.exit(not all(ended_well) or len(ended_well) < len(options.parts.split(",")))


if __name__ == "__main__":
    main()
