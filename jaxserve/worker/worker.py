"""A worker: finds its devices, sizes itself to them, loads the model and runs steps."""

import concurrent.futures
import functools
import logging
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.checkpoint.demo import cache_dir
from jaxserve.config import EngineConfig, check_resolved, replace
from jaxserve.messages import (
    ALONE,
    GrammarMask,
    ModelRunnerOutput,
    ProcessGroup,
    SchedulerOutput,
)
from jaxserve.worker import programs as compiled
from jaxserve.worker import sizing, warmup
from jaxserve.worker.buckets import make_buckets
from jaxserve.worker.logits_processors import load_logits_processors
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.process_group import join_group, least_of_all
from jaxserve.worker.program_store import ProgramStore
from jaxserve.worker.programs import Programs, RunnerState, empty_state
from jaxserve.worker.row_options import OptionSpec
from jaxserve.worker.sharding import device_bytes, make_mesh
from jaxserve.worker.step import StepSpec
from jaxserve.worker.token_scores import top_sizes
from jaxserve.worker.weights import load_params, param_shapes
from pallas_kernels.chips import Chip

logger = logging.getLogger(__name__)


class Worker:
    """One process's share of the model. `load` first, then `execute` and `collect` steps; between
    the two `sample` where a plan awaits a mask."""

    def __init__(self, config: EngineConfig, group: ProcessGroup = ALONE):
        self._config = config
        self._group = group
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
        join_group(self._config, self._group)
        devices = sizing.find_devices(self._config)
        mesh = make_mesh(devices)
        chip = sizing.chip_of_device(devices[0])
        kind = devices[0].device_kind
        logger.info("Device: %s (%s, kernels for %s)", kind, chip.platform, chip.name)
        config = sizing.resolve_for_device(self._config, devices[0])

        options = OptionSpec(config.info.vocab_size, load_logits_processors(config.info.vocab_size))
        processors = tuple((p.name, p.num_args) for p in options.processors)
        config = replace(config, logits_processors=processors)
        dtype = jnp.dtype(config.model.dtype)
        quantization = config.model.quantization
        shapes = param_shapes(config.info, dtype, mesh, quantization)
        parallel = config.parallel
        workers_on_host = parallel.workers_per_host * parallel.data_parallel_size
        free_bytes = sizing.memory_limit_bytes(devices, workers_on_host)
        free_bytes = least_of_all(free_bytes) - device_bytes(shapes)
        sizing.size_kv_cache(
            config, chip.platform, free_bytes, step_temp_bytes=0
        )  # before the long work
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            loading = pool.submit(load_params, config.info, dtype, mesh, quantization)
            config, programs, state = self._compile(
                config, chip, mesh, free_bytes, shapes, options, pool
            )
            params = loading.result()
        self._runner = ModelRunner(
            programs,
            params,
            state,
            options,
            sizing.blocks_per_sequence(config),
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
        chip: Chip,
        mesh: Mesh,
        free_bytes: int,
        params: dict[str, jax.ShapeDtypeStruct],
        options: OptionSpec,
        pool: concurrent.futures.Executor,
    ) -> tuple[EngineConfig, Programs, RunnerState]:
        """Compiles all programs, for a KV cache of the size that the largest step leaves room for.

        Where the size does not hang on the step, all compile at once, and `pool` fills the cache
        with zeros meanwhile; else first what tells how much a step needs.
        """
        scheduler = config.scheduler
        buckets = make_buckets(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            sizing.smallest_bucket(chip.platform),
            tiny=sizing.TINY_BUCKET if config.worker.matmul == "cpu" else 0,
        )[::-1]  # the largest takes longest: it goes first
        spec = StepSpec(
            config.info,
            sizing.kv_cache_layout(config, chip.platform),
            chip,
            config.worker.attention,
            "xla" if config.worker.matmul == "xla" else "auto",  # XLA has what C refuses
            jnp.dtype(config.model.dtype),
            buckets[0].num_tokens,
            mesh,
        )
        per_row = sizing.blocks_per_sequence(config)
        row_counts = sorted({bucket.num_rows for bucket in buckets})

        def shapes(num_blocks: int) -> RunnerState:
            step = compiled.state_shapes(spec, scheduler.max_num_seqs, per_row, num_blocks)
            return compiled.runner_state_shapes(spec, options, row_counts, step)

        assert config.worker.compilation_cache_dir is not None
        store = ProgramStore(Path(config.worker.compilation_cache_dir), list(mesh.devices.flat))
        run = functools.partial(warmup.run_parallel, store=store)

        # What a step needs does not depend on the cache's size: measured with the smallest one.
        smallest = shapes(per_row + 1)
        tops = top_sizes(config.model.max_logprobs, config.info.vocab_size)
        small_jobs = compiled.small_jobs(spec, options, tops, params, smallest)
        free_bytes -= compiled.state_bytes(smallest)
        size = functools.partial(sizing.size_kv_cache, config, chip.platform, free_bytes)
        blocks = size(step_temp_bytes=0)

        def forward_jobs(num_blocks: int) -> dict[compiled.Key, compiled.Job]:
            return compiled.forward_jobs(spec, buckets, params, shapes(num_blocks).step)

        if blocks.depends_on_step:
            largest = compiled.forward_jobs(spec, buckets[:1], params, smallest.step)
            programs = run(largest | small_jobs)
            blocks = size(compiled.step_bytes(programs))
            programs |= run(forward_jobs(blocks.count))
            filling = None
        else:
            filling = pool.submit(empty_state, shapes(blocks.count))
            programs = run(forward_jobs(blocks.count) | small_jobs)
        sized = size(compiled.step_bytes(programs))
        if sized.count < blocks.count:  # the step leaves less than the platform's default
            blocks = sized
            if filling:
                concurrent.futures.wait([filling])  # the one too large goes before the next comes
                filling = None
            programs |= run(forward_jobs(sized.count))
        logger.info(
            "num_kv_blocks = %d (%d tokens, %.2f GiB): %s",
            blocks.count,
            (blocks.count - 1) * config.cache.block_size,
            blocks.count * blocks.bytes_per_block / 2**30,
            blocks.reason,
        )
        config = replace(config, num_kv_blocks=blocks.count)
        state = filling.result() if filling else empty_state(shapes(blocks.count))
        return config, compiled.join_programs(programs), state
