"""A worker: finds its devices, sizes itself to them, loads the model and runs steps."""

import concurrent.futures
import functools
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.demo import cache_dir
from jaxserve.config import EngineConfig, check_resolved, replace
from jaxserve.messages import GrammarMask, ModelRunnerOutput, SchedulerOutput
from jaxserve.worker import programs as compiled
from jaxserve.worker import sizing, warmup
from jaxserve.worker.buckets import Bucket, make_buckets
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.programs import Job, Key, Programs, empty_state, state_shapes
from jaxserve.worker.step import DeviceState, StepSpec
from jaxserve.worker.weights import load_params, param_shapes

logger = logging.getLogger(__name__)


class Worker:
    """One process's share of the model. `load` first, then `execute` and `collect` steps; between
    the two `sample` where a plan awaits a mask."""

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

    def sample(self, mask: GrammarMask) -> None:
        """See `ModelRunner.sample`."""
        assert self._runner is not None, "load() first"
        self._runner.sample(mask)

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

        Where the size does not hang on the step, all compile at once; else first what tells how
        much a step needs.
        """
        layout = sizing.kv_cache_layout(config, platform)
        spec = StepSpec(config.info, layout, config.worker.attention)
        scheduler = config.scheduler
        buckets = make_buckets(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            sizing.smallest_bucket(platform),
        )
        rows_and_blocks = scheduler.max_num_seqs, sizing.blocks_per_sequence(config)

        def forward_jobs(buckets: Iterable[Bucket], num_blocks: int) -> dict[Key, Job]:
            state = state_shapes(spec, *rows_and_blocks, num_blocks)
            return {
                ("forwards", bucket): functools.partial(
                    compiled.compile_forward, spec, bucket, params, state
                )
                for bucket in buckets
            }

        buckets = buckets[::-1]  # the largest first: it takes longest
        # What a step needs does not depend on the cache's size: measured with the smallest one.
        smallest = sizing.blocks_per_sequence(config) + 1
        small_jobs = compiled.small_jobs(
            spec,
            sorted({bucket.num_rows for bucket in buckets}),
            state_shapes(spec, *rows_and_blocks, smallest),
        )
        size = functools.partial(sizing.size_kv_cache, config, platform, free_bytes)
        blocks = size(step_temp_bytes=0)
        if blocks.depends_on_step:
            programs = warmup.run_parallel(forward_jobs(buckets[:1], smallest) | small_jobs)
            blocks = size(compiled.step_bytes(spec, buckets, programs))
            programs |= warmup.run_parallel(forward_jobs(buckets, blocks.count))
        else:
            programs = warmup.run_parallel(forward_jobs(buckets, blocks.count) | small_jobs)
        sized = size(compiled.step_bytes(spec, buckets, programs))
        if sized.count < blocks.count:  # the step leaves less than the platform's default
            blocks = sized
            programs |= warmup.run_parallel(forward_jobs(buckets, sized.count))
        logger.info(
            "num_kv_blocks = %d (%d tokens, %.2f GiB): %s",
            blocks.count,
            (blocks.count - 1) * config.cache.block_size,
            blocks.count * blocks.bytes_per_block / 2**30,
            blocks.reason,
        )
        config = replace(config, num_kv_blocks=blocks.count)
        state = state_shapes(spec, *rows_and_blocks, blocks.count)
        return config, compiled.join_programs(programs), state
