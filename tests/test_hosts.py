"""Hosts, as orchestrators describe them to each of their pods and tasks."""

import pytest

from jaxserve.errors import UserError
from jaxserve.hosts import Hosts, detect_hosts, share_of_gpus, share_of_tpu_chips

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


@pytest.mark.parametrize(
    ("visible", "first", "count", "share"),
    [
        (None, 0, 2, "0,1"),
        (None, 4, 2, "4,5"),
        ("4,5,6,7", 2, 2, "6,7"),
        ("GPU-a,GPU-b", 1, 1, "GPU-b"),
        ("", 2, 2, ""),
        ("-1", 2, 2, "-1"),
    ],
)
@pytest.mark.parametrize(
    ("name", "share_of"),
    [("CUDA_VISIBLE_DEVICES", share_of_gpus), ("TPU_VISIBLE_CHIPS", share_of_tpu_chips)],
)
def test_a_process_has_its_share_of_the_visible_devices(
    name, share_of, visible, first, count, share
):
    environ = {"OTHER": "9,8"} if visible is None else {name: visible}
    assert share_of(environ, first, count) == share


def test_a_process_without_devices_is_refused():
    words = r"CUDA_VISIBLE_DEVICES shows 3 devices \(5,6,7\), and a process needs 2 behind the fir"
    with pytest.raises(UserError, match=words):
        share_of_gpus({"CUDA_VISIBLE_DEVICES": "5,6,7"}, 2, 2)
