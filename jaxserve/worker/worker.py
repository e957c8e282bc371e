"""A worker: finds its devices, sizes itself to them, loads the model and runs steps."""

import concurrent.futures
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.demo import cache_dir
from jaxserve.config import EngineConfig, check_resolved, replace
from jaxserve.messages import ModelRunnerOutput, SchedulerOutput
from jaxserve.worker import sizing, warmup
from jaxserve.worker.buckets import Bucket, make_buckets
from jaxserve.worker.model_runner import (
    EXTRA_WRITES,
    ModelRunner,
    Programs,
    empty_state,
    state_shapes,
)
from jaxserve.worker.step import DeviceState, StepSpec
from jaxserve.worker.weights import load_params, param_shapes

logger = logging.getLogger(__name__)


class Worker:
    """One process's share of the model. `load` first, then `execute` and `collect` steps."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._runner: ModelRunner | None = None

    def load(self) -> EngineConfig:
        """Loads, compiles and warms up; returns the config with nothing left open.

        Weights are read while the programs compile.

        Raises:
          UserError: the checkpoint is broken, or the model does not fit.
        """
        started_s = time.perf_counter()
        directory = self._config.worker.compilation_cache_dir or str(cache_dir() / "xla")
        self._config = replace(self._config, compilation_cache_dir=directory)
        warmup.use_compilation_cache(Path(directory))
        device, platform = sizing.find_device()
        logger.info("Device: %s (%s)", device.device_kind, platform)
        config = sizing.resolve_for_device(self._config, device)

        shapes = param_shapes(config.info, jnp.dtype(config.model.dtype))
        param_bytes = sum(shape.size * shape.dtype.itemsize for shape in shapes.values())
        free_bytes = sizing.memory_limit_bytes(device) - param_bytes
        sizing.size_kv_cache(
            config, platform, free_bytes, step_temp_bytes=0
        )  # before the long work
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load_params, config.info, jnp.dtype(config.model.dtype), device)
            config, programs, state = self._compile(config, platform, free_bytes, shapes)
            params = loading.result()
        self._runner = ModelRunner(
            programs,
            params,
            empty_state(state, device),
            sizing.blocks_per_sequence(config),
            device,
        )
        self._runner.warm_up()
        self._config = check_resolved(config)
        logger.info("Worker ready after %.1f s", time.perf_counter() - started_s)
        return self._config

    def execute(self, plan: SchedulerOutput) -> None:
        """See `ModelRunner.execute`."""
        assert self._runner is not None, "load() first"
        self._runner.execute(plan)

    def collect(self) -> ModelRunnerOutput:
        """See `ModelRunner.collect`."""
        assert self._runner is not None, "load() first"
        return self._runner.collect()

    def _compile(
        self,
        config: EngineConfig,
        platform: str,
        free_bytes: int,
        params: dict[str, jax.ShapeDtypeStruct],
    ) -> tuple[EngineConfig, Programs, DeviceState]:
        """Compiles all programs, for a KV cache of the size that the largest step leaves room for.

        Where the size does not hang on the step, all compile at once; else the largest goes first.
        """
        layout = sizing.kv_cache_layout(config, platform)
        spec = StepSpec(config.info, layout, config.worker.attention)
        scheduler = config.scheduler
        *buckets, largest = make_buckets(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            sizing.smallest_bucket(platform),
        )
        rows_and_blocks = scheduler.max_num_seqs, sizing.blocks_per_sequence(config)

        def job(bucket: Bucket, num_blocks: int) -> Callable[[], jax.stages.Compiled]:
            state = state_shapes(spec, *rows_and_blocks, num_blocks)
            return functools.partial(warmup.compile_step, spec, bucket, params, state)

        def compile_all(num_blocks: int) -> list[jax.stages.Compiled]:
            """The largest step, the other steps, the writes."""
            state = state_shapes(spec, *rows_and_blocks, num_blocks)
            jobs = [job(bucket, num_blocks) for bucket in (largest, *buckets)]
            jobs.append(functools.partial(warmup.compile_writes, state, EXTRA_WRITES))
            return warmup.run_parallel(jobs)

        size = functools.partial(sizing.size_kv_cache, config, platform, free_bytes)
        blocks = size(step_temp_bytes=0)
        if blocks.depends_on_step:
            # What a step needs does not depend on the cache's size: measured with the smallest one.
            smallest = sizing.blocks_per_sequence(config) + 1
            blocks = size(warmup.temp_bytes(job(largest, smallest)()))
        programs = compile_all(blocks.count)
        sized = size(warmup.temp_bytes(programs[0]))
        if sized.count < blocks.count:  # the step leaves less than the platform's default
            blocks, programs = sized, compile_all(sized.count)
        logger.info(
            "num_kv_blocks = %d (%d tokens, %.2f GiB): %s",
            blocks.count,
            (blocks.count - 1) * config.cache.block_size,
            blocks.count * blocks.bytes_per_block / 2**30,
            blocks.reason,
        )
        largest_step, *steps, writes = programs
        in_order = dict(zip([*buckets, largest], [*steps, largest_step], strict=True))
        config = replace(config, num_kv_blocks=blocks.count)
        state = state_shapes(spec, *rows_and_blocks, blocks.count)
        return config, Programs(in_order, writes), state
