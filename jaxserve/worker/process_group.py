"""Joins the processes whose devices make one mesh.

Every process runs every program, in the same order, on its own devices; what leaves a program is
whole on each of them, so any one of the processes can say what it was.
"""

import contextlib
import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxserve.config import EngineConfig, ParallelConfig
from jaxserve.errors import UserError
from jaxserve.hosts import share_of_gpus, share_of_tpu_chips
from jaxserve.messages import ProcessGroup

_START_TIMEOUT_S = 600  # hosts may be started minutes after each other
MAX_CPU_DEVICES = 64  # a host's CPU shows as many as a mesh takes
_FIRST_TPU_PORT = 8476
# How the chips of one host lie beside each other.
_TPU_HOSTS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def join_group(config: EngineConfig, group: ProcessGroup) -> None:
    """Before JAX starts: says how many devices this process has, and meets the other processes.

    Raises:
      UserError: the others do not come, or the chips cannot be shared out like that.
    """
    share = config.parallel.num_devices // group.size
    if 1 < config.parallel.num_devices <= MAX_CPU_DEVICES:
        with contextlib.suppress(RuntimeError):  # too late: JAX has started
            jax.config.update("jax_num_cpu_devices", share)
    if config.parallel.data_parallel_size > 1:
        _show_devices_of_engine(config.parallel)
    if group.size == 1:
        return
    per_host = config.parallel.workers_per_host
    on_host = group.rank % per_host
    if share == 1 and config.parallel.num_hosts == 1:
        _give_tpu_chip(group, config.parallel.data_parallel_rank)
    local_ids = range(on_host * share, (on_host + 1) * share) if per_host > 1 else None
    try:
        jax.distributed.initialize(
            group.coordinator,
            num_processes=group.size,
            process_id=group.rank,
            local_device_ids=local_ids,
            initialization_timeout=_START_TIMEOUT_S,
        )
    except RuntimeError as error:
        raise UserError(
            f"Worker {group.rank} cannot meet the {group.size - 1} others at {group.coordinator}: "
            f"{' '.join(str(error).split())}.",
            fix="Look for what ended them, above.",
        ) from error


def least_of_all(num_bytes: int) -> int:
    """The least of the numbers that the processes of the group have here, each calling this once.

    No process may go on with a number of its own: programs of other shapes would wait for ever.
    """
    if jax.process_count() == 1:
        return num_bytes
    mebibytes = np.int32(num_bytes >> 20)  # JAX has no larger integers
    return int(multihost_utils.process_allgather(mebibytes).min()) << 20


def _show_devices_of_engine(parallel: ParallelConfig) -> None:
    """Hides the devices of other engine cores, as CUDA and libtpu read it from the environment.

    Raises:
      UserError: there are not so many.
    """
    num_devices = parallel.num_devices
    first = parallel.data_parallel_rank * num_devices
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": share_of_gpus(os.environ, first, num_devices),
        "TPU_VISIBLE_CHIPS": share_of_tpu_chips(os.environ, first, num_devices),
    }
    if num_devices in _TPU_HOSTS:
        os.environ |= {
            "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_HOSTS[num_devices],
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }


def _give_tpu_chip(group: ProcessGroup, engine_idx: int) -> None:
    """libtpu reads from the environment which chip is this process's, and who has the others."""
    if group.size not in _TPU_HOSTS:
        return
    first_port = _FIRST_TPU_PORT + engine_idx * group.size
    ports = range(first_port, first_port + group.size)
    chip = {
        # Of those that are visible: its engine core's, where there are several.
        "TPU_VISIBLE_CHIPS": share_of_tpu_chips(os.environ, group.rank, 1),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": _TPU_HOSTS[group.size],
        "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
        "TPU_PROCESS_PORT": str(ports[group.rank]),
        "CLOUD_TPU_TASK_ID": str(group.rank),
    }
    os.environ |= chip
