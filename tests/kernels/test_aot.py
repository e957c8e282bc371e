"""What can be compiled ahead of time, without a compiler; with one: tests/compile."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement

from pallas_kernels import aot
from pallas_kernels.chips import CHIPS
from tests.structure import locked_versions

REQUIREMENTS = Path(__file__).parent.parent.parent / "requirements"


@pytest.fixture(params=["v6e", "h100"])
def chip(request, monkeypatch):
    """A chip whose compiler is not there, whatever is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return CHIPS[request.param]


def test_every_accelerator_is_compiled_for():
    accelerators = {name: chip for name, chip in CHIPS.items() if chip.platform != "cpu"}
    assert accelerators == aot.COMPILED_CHIPS
    assert "no program is compiled for cpu" in (aot.missing_reason(CHIPS["cpu"]) or "")


def test_a_missing_compiler_is_named_with_what_to_do(chip):
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    message = f"the compiler for {chip.name}, is not installed .*: run this with scripts/with_comp"
    for call in (aot.devices, lambda chip: aot.compile_for(chip, jnp.sin, shape)):
        with pytest.raises(aot.CompilerMissingError, match=message):
            call(chip)


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_xla_is_told_the_figures_of_the_chip(name):
    chip, target = CHIPS[name], aot._gpu_target(CHIPS[name])
    figures = dict(re.findall(r"(\w+): (\w+)", target))
    assert int(figures["core_count"]) == chip.num_cores
    assert int(figures["shared_memory_per_block_optin"]) == chip.core_memory_bytes
    assert int(figures["memory_bandwidth"]) == chip.hbm_bytes_per_s
    major, minor = chip.capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} " in target
    assert ("ACCELERATED_FEATURES" in target) == (chip.capability >= (9, 0))


def test_the_compilers_are_those_of_the_locked_jax():
    locked, compilers = (
        locked_versions(REQUIREMENTS / f"{name}.txt") for name in ("runtime", "kernels")
    )
    assert compilers["jax-cuda12-plugin"] == compilers["jax-cuda12-pjrt"] == locked["jax"]
    assert importlib.metadata.version("jax") == locked["jax"]
    wanted = [Requirement(line) for line in importlib.metadata.requires("jax") or ()]
    [libtpu] = [requirement for requirement in wanted if requirement.name == "libtpu"]
    assert compilers["libtpu"] in libtpu.specifier
