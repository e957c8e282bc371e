"""Hosts, as orchestrators describe them to each of their pods and tasks."""

import pytest

from jaxserve.hosts import Hosts, detect_hosts

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "llm-0.llm.default"}
TPU = {"TPU_WORKER_HOSTNAMES": "tpu-0.svc,tpu-1.svc", "TPU_WORKER_ID": "1"}
SLURM = {
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "gpu-[007-009,12]",
}


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        (LWS, Hosts(4, 2, "llm-0.llm.default:8470", "LeaderWorkerSet")),
        (TPU, Hosts(2, 1, "tpu-0.svc:8470", "TPU workers")),
        (SLURM, Hosts(3, 0, "gpu-007:8470", "Slurm")),
        (LWS | TPU | SLURM, Hosts(4, 2, "llm-0.llm.default:8470", "LeaderWorkerSet")),
        (LWS | {"LWS_GROUP_SIZE": "1"} | TPU, Hosts(2, 1, "tpu-0.svc:8470", "TPU workers")),
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, None),
        ({"SLURM_JOB_NUM_NODES": "8", "SLURM_NODEID": "0"}, None),
        (TPU | {"TPU_WORKER_ID": "?"}, None),
        ({}, None),
    ],
)
def test_hosts_are_those_of_the_environment(environ, hosts):
    assert detect_hosts(environ) == hosts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[01,04-09]-ib,m2", "n01-ib"),
        ("rack3-n[10]", "rack3-n10"),
    ],
)
def test_the_first_node_of_slurms_short_list(nodes, first):
    found = detect_hosts(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert found is not None and found.coordinator == f"{first}:8470"
