"""The compile tests themselves: what they are there to find is found."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.aot import compile_for, make_mesh
from pallas_kernels.chips import Chip
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


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A program in which 8 devices exchange: once, in five turns of a loop, in a branch; or in a
    loop that turns until something is known."""

    chip: str
    is_counted: bool = True

    def program(self) -> "Exchange":
        return self

    def compile(self, chip: Chip) -> jax.stages.Compiled:
        mesh = make_mesh(chip, {"d": 8})

        def counted(x: Any) -> Any:
            x = jnp.sin(jax.lax.psum(x, "d"))
            x = jax.lax.fori_loop(0, 5, lambda _, y: jax.lax.psum(jnp.sin(y), "d"), x)
            whole = jax.lax.cond(
                x[0, 0] > 0,
                lambda: jax.lax.all_gather(x.astype(jnp.bfloat16), "d"),
                lambda: jnp.zeros((8, *x.shape), jnp.bfloat16),
            )
            return x + whole.sum(0)

        def uncounted(x: Any) -> Any:
            return jax.lax.while_loop(
                lambda y: y[0, 0] > 0, lambda y: jax.lax.psum(jnp.sin(y), "d"), x
            )

        fn = counted if self.is_counted else uncounted
        whole = PartitionSpec()
        on_mesh = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return compile_for(chip, on_mesh, jax.ShapeDtypeStruct((16, 128), jnp.float32), mesh=mesh)


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


@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_collectives_are_counted(compilers, chip):
    found = hlo.collectives(compilers.submit(Exchange(chip)).result().hlo)
    assert {each.num_devices for each in found} == {8}
    sums = [each for each in found if each.name == "all-reduce"]
    assert sorted(each.times for each in sums) == [1, 5]
    assert {each.num_bytes for each in sums} == {4 * 16 * 128}
    (gather,) = (each for each in found if each not in sums)
    assert (gather.name, gather.num_bytes, gather.times) == ("all-gather", 8 * 2 * 16 * 128, 1)
    sent = 6 * 2 * 4 * 16 * 128 * 7 / 8 + 7 * 2 * 16 * 128
    assert sum(each.link_bytes for each in found) == sent
    with pytest.raises(ValueError, match="how often"):
        hlo.collectives(compilers.submit(Exchange(chip, is_counted=False)).result().hlo)


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


@pytest.mark.parametrize(
    ("groups", "num_devices"),
    [
        ("replica_groups=mesh['data'=2,'model'=8] {'model'}", 8),
        ("replica_groups=mesh['data'=2,'model'=8] {'data','model':(2)4}", 8),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups={}", 16),
    ],
)
def test_collectives_are_read(groups, num_devices):
    text = f"""HloModule jit_f, num_partitions=16

%wrapped (p: bf16[8,4]) -> bf16[2,4] {{
  ROOT %scatter = (bf16[2,4]{{1,0:T(8,128)}}, f32[]) reduce-scatter(%p), {groups}, metadata={{}}
}}

ENTRY %main (p: bf16[8,4]) -> bf16[32,4] {{
  %start = ((bf16[8,4]{{1,0}}), bf16[2,4]) async-start(%p), calls=%wrapped
  %done = bf16[2,4]{{1,0}} async-done(%start), calls=%wrapped
  %all-gather-start = (bf16[2,4]{{1,0}}, bf16[32,4]{{1,0}}) all-gather-start(%done), {groups}
  ROOT %all = bf16[32,4]{{1,0}} all-gather-done(%all-gather-start)
}}
"""
    scatter, gather = sorted(hlo.collectives(text), key=lambda each: each.num_bytes)
    assert (scatter.name, scatter.num_bytes, scatter.times) == ("reduce-scatter", 20, 1)
    assert (gather.name, gather.shape, gather.times) == ("all-gather", "bf16[32,4]", 1)
    assert scatter.num_devices == gather.num_devices == num_devices
    assert scatter.link_bytes == 20 * (num_devices - 1)


def test_ptxas_is_read():
    said = """
    440 bytes stack frame, 996 bytes spill stores, 1068 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 2 barriers
"""
    assert ptxas_figures(said) == ((168, 2064), (90, 0))
