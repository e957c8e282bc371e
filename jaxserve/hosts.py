"""What the environment says of the hosts that shall share one model, and of their devices."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.errors import UserError

DEFAULT_PORT = 8470


class Hosts(NamedTuple):
    """num_hosts, and which of them this is.  coordinator: host:port of number 0."""

    num_hosts: int
    host_id: int
    coordinator: str
    source: str


def detect_hosts(environ: Mapping[str, str]) -> Hosts | None:
    """The hosts of which this process was started on one; None where it was started alone.

    Read are, in this order, what these set in each of several pods or tasks:
    - LeaderWorkerSet: LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS;
    - GKE, for TPUs: TPU_WORKER_HOSTNAMES, TPU_WORKER_ID;
    - Slurm, for a step on several nodes: SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST.
    """
    for find in (_leader_worker_set, _gke_tpu, _slurm):
        try:
            found = find(environ)
        except (KeyError, ValueError):  # not set, or not by whom it seems to be
            continue
        if found.num_hosts > 1:
            return found
    return None


def share_of_gpus(environ: Mapping[str, str], first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES for `count` of the visible GPUs, those behind the first `first`.

    Raises:
      UserError: it is set, and shows fewer.
    """
    return _share("CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"), first, count)


def share_of_tpu_chips(environ: Mapping[str, str], first: int, count: int) -> str:
    """TPU_VISIBLE_CHIPS, as `share_of_gpus`."""
    return _share("TPU_VISIBLE_CHIPS", environ.get("TPU_VISIBLE_CHIPS"), first, count)


def _share(name: str, visible: str | None, first: int, count: int) -> str:
    if visible in ("", "-1"):  # all are hidden, and stay so
        return visible
    devices = visible.split(",") if visible else [str(i) for i in range(first + count)]
    if len(devices) < first + count:
        raise UserError(
            f"{name} shows {len(devices)} devices ({visible}), and a process needs {count} behind "
            f"the first {first}.",
            fix="Use a smaller --data-parallel-size or --mesh, or show more devices.",
        )
    return ",".join(devices[first : first + count])


def _leader_worker_set(environ: Mapping[str, str]) -> Hosts:
    return Hosts(
        int(environ["LWS_GROUP_SIZE"]),
        int(environ["LWS_WORKER_INDEX"]),
        f"{environ['LWS_LEADER_ADDRESS']}:{DEFAULT_PORT}",
        "LeaderWorkerSet",
    )


def _gke_tpu(environ: Mapping[str, str]) -> Hosts:
    names = environ["TPU_WORKER_HOSTNAMES"].split(",")
    return Hosts(
        len(names),
        int(environ["TPU_WORKER_ID"]),
        f"{names[0].strip()}:{DEFAULT_PORT}",
        "TPU workers",
    )


def _slurm(environ: Mapping[str, str]) -> Hosts:
    return Hosts(
        int(environ["SLURM_STEP_NUM_NODES"]),
        int(environ["SLURM_NODEID"]),
        f"{_first_node(environ['SLURM_STEP_NODELIST'])}:{DEFAULT_PORT}",
        "Slurm",
    )


def _first_node(nodes: str) -> str:
    """The first of Slurm's short list, such as "gpu-[007-009,12],login": "gpu-007"."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes)
    if first is None:
        raise ValueError(nodes)
    return "".join(part or "" for part in first.groups())
