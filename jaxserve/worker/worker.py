"""A worker: finds its devices, sizes itself to them, loads the model and runs steps."""

import concurrent.futures
import functools
import logging
import time
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
        device = jax.local_devices()[0]
        platform = sizing.platform_of(device)
        logger.info("Device: %s (%s)", device.device_kind, platform)
        config = sizing.resolve_for_device(self._config, device)

        shapes = param_shapes(config.info, jnp.dtype(config.model.dtype))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load_params, config.info, jnp.dtype(config.model.dtype), device)
            config, programs, state = self._compile(config, device, shapes)
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
        self, config: EngineConfig, device: jax.Device, params: dict[str, jax.ShapeDtypeStruct]
    ) -> tuple[EngineConfig, Programs, DeviceState]:
        """Compiles the largest step, sizes the KV cache by what it needs, compiles the rest."""
        platform = sizing.platform_of(device)
        spec = StepSpec(
            config.info, sizing.kv_cache_layout(config, platform), config.worker.attention
        )
        buckets = make_buckets(
            config.scheduler.max_num_batched_tokens,
            config.scheduler.max_num_seqs,
            sizing.smallest_bucket(platform),
        )
        param_bytes = sum(p.size * p.dtype.itemsize for p in params.values())
        free_bytes = sizing.memory_limit_bytes(device) - param_bytes

        def state_for(config: EngineConfig) -> DeviceState:
            return state_shapes(
                spec,
                config.scheduler.max_num_seqs,
                sizing.blocks_per_sequence(config),
                config.cache.num_kv_blocks,
            )

        def compile_bucket(bucket: Bucket, config: EngineConfig) -> jax.stages.Compiled:
            return warmup.compile_step(spec, bucket, params, state_for(config))

        guess = sizing.resolve_num_kv_blocks(config, platform, free_bytes, step_temp_bytes=0)
        largest = compile_bucket(buckets[-1], guess)
        temp_bytes = largest.memory_analysis().temp_size_in_bytes
        sized = sizing.resolve_num_kv_blocks(config, platform, free_bytes, temp_bytes)
        if sized.cache.num_kv_blocks != guess.cache.num_kv_blocks:
            largest = compile_bucket(buckets[-1], sized)
        jobs = [functools.partial(compile_bucket, bucket, sized) for bucket in buckets[:-1]]
        jobs.append(functools.partial(warmup.compile_writes, state_for(sized), EXTRA_WRITES))
        *steps, writes = warmup.run_parallel(jobs)
        programs = Programs(dict(zip(buckets, [*steps, largest], strict=True)), writes)
        return sized, programs, state_for(sized)
