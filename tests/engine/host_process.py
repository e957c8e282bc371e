"""A host that runs fake workers; its arguments are a worker class and what the config says."""

import sys

from jaxserve.engine.executor.host_agent import run_host
from jaxserve.errors import EngineDeadError
from jaxserve.logs import setup_logging
from tests.fakes import fake_config

if __name__ == "__main__":
    worker, port, step_timeout_s, block_size = sys.argv[1:]
    config = fake_config(
        num_hosts=2,
        host_id=1,
        coordinator=f"127.0.0.1:{port}",
        step_timeout_s=float(step_timeout_s),
        block_size=int(block_size),
    )
    setup_logging("info", "host-1")
    try:
        sys.exit(run_host(config, f"tests.fakes:{worker}"))
    except EngineDeadError as error:
        sys.exit(f"ended: {error}")
