"""A mesh: how a model is cut, what is refused, and that it computes what one device computes."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxserve import config as configs
from jaxserve.config import EngineConfig, resolve_for_model
from jaxserve.errors import UserError
from jaxserve.models.partition import pad_to, partition, place_heads
from jaxserve.worker import programs, sizing
from pallas_kernels.chips import CHIPS
from tests.worker import tiny
from tests.worker.tiny import INFO

ROOT = Path(__file__).parent.parent.parent


def test_meshes_compute_what_one_device_does(pytestconfig):
    """In a process of its own, as JAX must know how many devices a CPU shows before it starts."""
    file = Path(__file__).with_name("on_eight_devices.py")
    slow = ["--slow"] if pytestconfig.getoption("slow") else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(file), *slow],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# --- parts ---------------------------------------------------------------------------------------


@given(
    num_kv_heads=st.integers(1, 12),
    group=st.integers(1, 16),
    mlp=st.integers(1, 40),
    num_parts=st.integers(1, 16),
)
def test_every_head_is_computed_once_beside_its_kv_head(num_kv_heads, group, mlp, num_parts):
    num_heads = num_kv_heads * group
    cut = partition(
        replace(INFO, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=mlp),
        num_parts,
    )
    assert len(cut.kv_heads) % num_parts == 0 and len(cut.q_heads) == len(cut.kv_heads)
    assert mlp <= cut.mlp < mlp + num_parts and cut.mlp % num_parts == 0
    q_heads = [head for head in cut.q_heads.ravel().tolist() if head >= 0]
    assert sorted(q_heads) == list(range(num_heads))
    assert set(cut.kv_heads.tolist()) - {-1} == set(range(num_kv_heads))
    for kv_head, mine in zip(cut.kv_heads, cut.q_heads, strict=True):
        assert all(head // group == kv_head for head in mine if head >= 0)
    # No KV head has more copies than the parts need, and as many places are dummies as must be.
    copies = max(1, num_parts // num_kv_heads)
    assert len(cut.kv_heads) - copies * num_kv_heads < num_parts
    if num_parts == 1 or (num_kv_heads % num_parts == 0):
        assert q_heads == cut.q_heads.ravel().tolist() == list(range(num_heads))


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "num_parts", "kv_heads", "q_heads"),
    [
        (2, 4, 4, [0, 0, 1, 1], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 3, 4, [0, 0, 1, 1], [[0, 1], [2, -1], [3, 4], [5, -1]]),
        (3, 2, 2, [0, 1, 2, -1], [[0, 1], [2, 3], [4, 5], [-1, -1]]),
        (1, 4, 4, [0, 0, 0, 0], [[0], [1], [2], [3]]),
    ],
)
def test_places(num_kv_heads, group, num_parts, kv_heads, q_heads):
    info = replace(INFO, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads)
    cut = partition(info, num_parts)
    assert (cut.kv_heads.tolist(), cut.q_heads.tolist()) == (kv_heads, q_heads)


def test_dummies_are_zeros_and_wrong_lengths_stay_wrong():
    heads = np.arange(6.0).reshape(3, 2) + 1
    placed = place_heads(heads, np.array([[2, -1], [0, 2]]))
    assert placed.tolist() == [[[5, 6], [0, 0]], [[1, 2], [5, 6]]]
    assert np.shares_memory(place_heads(heads, np.array([0, 1, 2])), heads)
    assert pad_to(np.ones((2, 3)), 1, 3, 4).tolist() == [[1, 1, 1, 0]] * 2
    assert pad_to(np.ones((2, 5)), 1, 3, 4).shape == (2, 6)


# --- what an operator asks for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "problem", "fix"),
    [
        ("33x4", "--mesh 33x4 --data-parallel-size 2 are 66 engine cores", "several servers"),
        ("4", "--mesh '4' is not", "such as --mesh 1x4"),
        ("1x0", "--mesh '1x0' is not", "such as --mesh 1x4"),
        ("1x-2", "--mesh '1x-2' is not", "such as --mesh 1x4"),
        ("1x4x2", "--mesh '1x4x2' is not", "such as --mesh 1x4"),
        ("1x" + "9" * 5000, "9' is not two numbers of devices from 1 to 4096", "--mesh 1x4"),
        ("1x99999", "--mesh '1x99999' is not", "such as --mesh 1x4"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh, problem, fix):
    with pytest.raises(UserError) as caught:
        resolve_for_model(configs.replace(EngineConfig(), mesh=mesh, data_parallel_size=2), INFO)
    assert problem in caught.value.problem and fix in caught.value.fix


def test_a_data_axis_is_so_many_engine_cores():
    config = configs.replace(EngineConfig(), mesh="2x4", data_parallel_size=3)
    parallel = resolve_for_model(config, INFO).parallel
    assert (parallel.mesh, parallel.data_parallel_size, parallel.num_devices) == ("1x4", 6, 4)
    with pytest.raises(UserError, match="Several engine cores, of --data-parallel-size or --mesh"):
        resolve_for_model(configs.replace(config, num_hosts=2, coordinator="h:8470"), INFO)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    devices = [mock.Mock(spec=jax.Device, platform="cuda") for _ in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    config = configs.replace(EngineConfig(), mesh="1x4")
    assert sizing.find_devices(config) == devices
    assert sizing.find_devices(EngineConfig()) == devices[:1]
    with pytest.raises(UserError) as caught:
        sizing.find_devices(configs.replace(config, mesh="1x8"))
    assert caught.value.problem == "--mesh 1x8 needs 8 devices, but JAX has 4."
    assert caught.value.fix == "Use --mesh 1x4."
    devices[0].platform = "cpu"
    with pytest.raises(UserError, match="a CPU shows itself as 64 at most"):
        sizing.find_devices(configs.replace(config, mesh="1x65"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 16, "num_kv_heads": 8}, "each device has 1/4 of the weights"),
        ({"num_heads": 8}, "the weights; 2 have the same KV head, as there are 2 KV heads"),
        ({"num_heads": 6}, "2 KV heads; 2 dummy query heads, as 6 do not divide"),
        ({"num_heads": 8, "num_kv_heads": 4, "vocab_size": 66}, "as 66 tokens do not divide"),
    ],
)
def test_what_each_device_has_is_logged(changes, words, caplog):
    config = configs.replace(
        EngineConfig(), info=replace(INFO, **changes), max_model_len=32, mesh="1x4"
    )
    device = mock.Mock(spec=jax.Device, platform="cpu", device_kind="cpu")
    with caplog.at_level(logging.INFO, sizing.__name__):
        sizing.resolve_for_device(config, device)
    line = next(r.message for r in caplog.records if r.message.startswith("mesh = 1x4: "))
    assert line.endswith(words)


def test_a_device_serves_its_share_of_the_heads():
    config = configs.replace(
        EngineConfig(), info=INFO, dtype="float32", max_model_len=32, block_size=4, mesh="1x4"
    )
    call = sizing.attention_call(config, CHIPS["v6e"])
    assert (call.num_heads, call.layout.num_kv_heads) == (1, 1)
    free = [mock.Mock(spec=jax.Device, platform="cuda", process_index=0) for _ in range(2)]
    for device, used in zip(free, (10, 30), strict=True):
        device.memory_stats.return_value = {"bytes_limit": 100, "bytes_in_use": used}
    assert sizing.memory_limit_bytes(free) == 70


@pytest.mark.parametrize("is_memory", [True, False])
def test_a_program_that_does_not_fit_is_the_operators_error(is_memory, monkeypatch):
    words = "RESOURCE_EXHAUSTED: 20 GiB of 16\nand more" if is_memory else "INTERNAL: a bug"
    failing = mock.Mock(side_effect=jax.errors.JaxRuntimeError(words))
    monkeypatch.setattr(jax.stages.Lowered, "compile", failing)
    with pytest.raises(UserError if is_memory else jax.errors.JaxRuntimeError) as caught:
        programs.compile_writes(tiny.shapes().step, 4)
    if is_memory:
        assert caught.value.problem.endswith("memory: RESOURCE_EXHAUSTED: 20 GiB of 16")
        assert "--mesh" in caught.value.fix
