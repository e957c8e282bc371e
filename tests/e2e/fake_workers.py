"""`python -m tests.e2e.fake_workers serve ...`: the whole server, but workers that have no model.

A step takes 20 ms. What they generate follows from the prompt (`tests.fakes.fake_output`).
"""

import functools
import sys

from jaxserve import cli
from jaxserve.config import EngineConfig, replace
from jaxserve.server import serve as server
from tests.fakes import SlowWorker


class Worker(SlowWorker):
    """Derives what a worker with a device would."""

    def load(self) -> EngineConfig:
        self.config = replace(
            self.config,
            dtype="float32",
            block_size=16,
            num_kv_blocks=2000,
            max_num_seqs=self.config.scheduler.max_num_seqs or 64,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens or 512,
            max_num_mixed_tokens=512,
            jump_ahead_tokens=8,
            attention="reference",
            matmul="xla",
            compilation_cache_dir="none",
            logits_processors=(),
        )
        return self.config


if __name__ == "__main__":
    server.serve = functools.partial(server.serve, worker_class="tests.e2e.fake_workers:Worker")
    sys.exit(cli.main())
