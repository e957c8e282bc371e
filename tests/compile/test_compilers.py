"""The compile tests themselves: what they are there to find is found."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compile import hlo
from tests.compile.compilers import Compiled, Compilers, Program, Refused, ptxas_figures

_CACHE = jax.ShapeDtypeStruct((2, 1021, 64, 1024), jnp.bfloat16)


def _updated(cache: Any) -> Any:
    return cache.at[1, 3].set(1)


def _updated_and_kept(cache: Any) -> Any:
    return cache.at[1, 3].set(1), cache


def _layer_taken_out(cache: Any) -> Any:
    layer = jax.lax.optimization_barrier(cache[1] * 1)
    return cache.at[1].set(layer.at[3].set(1))


def _aborts(cache: Any) -> Any:
    os.write(1, b"out of luck")
    os.abort()


def _raises(cache: Any) -> Any:
    raise NotImplementedError("no such operation")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is a function of the cache alone."""

    chip: str
    fn: Any

    def program(self) -> Program:
        return Program(jax.jit(self.fn, donate_argnums=0), (_CACHE,))


@pytest.fixture
def compile_step(compilers: Compilers):
    return lambda chip, fn: compilers.submit(Step(chip, fn)).result()


@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_copies_are_found(compile_step, chip):
    layer_bytes = hlo.num_bytes(_CACHE) // 2
    in_place = compile_step(chip, _updated)
    assert in_place.alias_bytes == hlo.num_bytes(_CACHE)
    assert in_place.temp_bytes < layer_bytes // 100
    assert not hlo.copies(in_place.hlo, layer_bytes // 2)
    for step in (_updated_and_kept, _layer_taken_out):
        copying = compile_step(chip, step)
        assert copying.temp_bytes >= layer_bytes or hlo.copies(copying.hlo, layer_bytes // 2)


def test_what_a_compiler_says_and_its_death_are_results(compile_step):
    assert compile_step("v6e", _raises) == Refused("NotImplementedError: no such operation")
    died = compile_step("v6e", _aborts)
    assert isinstance(died, Refused) and "died; its last words: " in died.words
    assert "out of luck" in died.words
    assert isinstance(compile_step("v6e", _updated), Compiled)


def test_hlo_is_read():
    text = """
  %copy.3 = bf16[2,1021,64]{2,1,0:T(8,128)} copy(%p), metadata={}
  ROOT copy-start = (u8[40,2]{1,0}, u8[40,2]{1,0:S(1)}, u32[]) copy-start(p.1)
  %fusion = bf16[2,1021,64]{2,1,0} fusion(%p), kind=kLoop
"""
    assert len(hlo.copies(text, 80)) == 2
    assert len(hlo.copies(text, 81)) == 1
    assert not hlo.copies(text, 2 * 2 * 1021 * 64 + 1)
    assert hlo.largest("(f8e4m3fn[3,5], pred[2])") == 15


def test_ptxas_is_read():
    said = """
    440 bytes stack frame, 996 bytes spill stores, 1068 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 2 barriers
"""
    assert ptxas_figures(said) == ((168, 2064), (90, 0))
