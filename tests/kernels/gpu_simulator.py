"""JAX's simulator of GPUs, with what it lacks that the kernels use.

A race is found by vector clocks: two accesses of a place, one of them a write, between which no
barrier, no fence and no wait puts an order, whichever of them the simulator happens to do first.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state.discharge import run_state_p
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir

from tests.kernels.tpu_simulator import raise_races

# Asynchronous operations that are told apart from each other; those that share a clock may hide a
# race. More than are ever on their way at once.
_NUM_CLOCKS = 256


@contextlib.contextmanager
def simulate() -> Iterator[None]:
    """Kernels traced in this context run in the simulator, which fails on a data race."""
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=_NUM_CLOCKS)
    with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(params):
        interpreter = jaxpr_interpret.JaxprInterpreter
        patch.setattr(interpreter, "_interpret_inline_mgpu_p", _by_own_rule)
        patch.setattr(interpreter, "interpret", _interpret)
        simulated = raise_races(patch, gpu_callbacks, "GPURaceDetectionState")
        try:
            yield
            jax.effects_barrier()
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert simulated, "no kernel has run"


_interpret_known = jaxpr_interpret.JaxprInterpreter.interpret


def _interpret(self: Any, jaxpr: Any, token: jax.Array, *args: Any) -> Any:
    """Interprets what there is a rule for here as a primitive that has a method."""

    def known(eqn: Any) -> Any:
        rule = _RULES.get(eqn.primitive)
        if rule is None or (rule is _copy and eqn.params["has_barrier"]):
            return eqn
        params = {"rule": rule, "eqn": eqn}
        return eqn.replace(primitive=primitives.inline_mgpu_p, params=params)

    return _interpret_known(
        self, jaxpr.replace(eqns=[known(eqn) for eqn in jaxpr.eqns]), token, *args
    )


def _by_own_rule(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """Also inline code of a kernel: what there is takes an array to another layout."""
    if "rule" in eqn.params:
        token, out = eqn.params["rule"](self, eqn.params["eqn"], token, get_invals)
        # The primitive that it is called by has several results.
        return token, out if eqn.params["eqn"].primitive.multiple_results else [out]
    (value,), (out,) = get_invals(), eqn.outvars
    assert (value.shape, value.dtype) == (out.aval.shape, out.aval.dtype), eqn
    return token, [value]


def _call(self: Any, function: Callable[..., Any], eqn: Any, token: jax.Array, **args: Any) -> Any:
    """A callback that runs when the kernel comes to `eqn`; returns the token."""
    return callback.io_callback(
        functools.partial(gpu_callbacks.fail_on_exception(function), source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        **args,
    )


def _run_state(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """`run_state`: every operand that is no reference becomes a buffer in registers."""
    assert "is_initialized" in eqn.params and all(eqn.params["is_initialized"]), eqn
    common = dict(mesh_location=self.mesh_location, thread=self.thread)
    space = shared_memory.get_memory_space_idx(plgpu.REGS)
    keys, buffers = [], []
    for var, value in zip(eqn.invars, get_invals(), strict=True):
        is_value = not isinstance(var.aval, AbstractRef)
        if is_value:
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token, compute_unit=self.thread, memory_space_id=space, initial_ref_count=1
            )
            token, value = gpu_callbacks.call_allocate_buffer(
                token=token,
                allocation_request_as_array=request,
                value=jnp.asarray(value),
                source_info=eqn.source_info,
                **common,
            )
        keys.append(value)
        buffers.append(is_value)
    token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
    token = _await(self, eqn, token, "products", num_left=0)
    results = []
    for var, key, is_buffer in zip(eqn.outvars, keys, buffers, strict=True):
        if not is_buffer:
            results.append(key)
            continue
        place = dict(allocation_key_as_array=key, source_info=eqn.source_info, **common)
        token, value = gpu_callbacks.call_get(
            token=token, result_shape_and_dtype=var.aval, transforms=(), **place
        )
        token = gpu_callbacks.call_deallocate_buffer(token=token, **place)
        results.append(value)
    return token, results


def _mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """What `plgpu.mma` computes; the simulator has no rule for it."""
    return acc + jnp.matmul(a.astype(acc.dtype), b.astype(acc.dtype), precision="highest")


mlir.register_lowering(primitives.mma_p, mlir.lower_fun(_mma, multiple_results=False))


def _on_their_way(kind: str, thread: Any) -> collections.deque[Any]:
    """Clocks of a thread's asynchronous operations that it has not awaited, oldest first.

    They are kept beside the threads' clocks, which are new for every thread block.
    """
    clocks: dict[Any, Any] = gpu_callbacks._get_shared_memory().clocks
    return clocks.setdefault((kind, thread), collections.deque())


def _begin(thread: Any) -> Any:
    """The clock of an asynchronous operation that the thread begins."""
    memory: Any = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())
    return clock


def _await(self: Any, eqn: Any, token: jax.Array, kind: str, num_left: int) -> jax.Array:
    """Ends all of the thread's operations of one kind but the newest `num_left`."""

    def end(*, token: jax.Array, thread: Any, **_: Any) -> jax.Array:
        operations = _on_their_way(kind, thread)
        memory: Any = gpu_callbacks._get_shared_memory()
        while len(operations) > num_left:
            memory.clocks[thread].update(operations.popleft())
        return token

    return _call(self, end, eqn, token)


class _Place:
    """A part of a buffer, as a callback is given it."""

    def __init__(self, where: tuple[Any, Any], thread: Any, info: Any) -> None:
        key, transforms = where
        self._memory: Any = gpu_callbacks._get_shared_memory()
        self._thread, self._info = thread, info
        self.key = shared_memory.HostAllocationKey.from_array(key)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        self.access = self._memory.access(self.key, transforms)

    def read(self) -> Any:
        read = self._memory.get_buffer_content
        return read(self.key, self.access, self._thread, logging_info=self._info)[0]

    def write(self, value: Any) -> None:
        write = self._memory.store_buffer_content
        write(self.key, self.access, value, self._thread, logging_info=self._info)


def _resolve(eqn: Any, i: int, value: Any, transforms: Any) -> Any:
    return jaxpr_interpret.resolve_ref(eqn.invars[i].aval, value, transforms)


def _wgmma(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """wgmma whose left operand may be in registers, and whose reads may race."""
    acc, a, b, *leaves = get_invals()
    none = jax.tree.structure([])
    trees = [eqn.params[f"{name}_transforms_tree"] or none for name in ("acc", "a", "b")]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    acc, b = _resolve(eqn, 0, acc, transforms[0]), _resolve(eqn, 2, b, transforms[2])
    if isinstance(eqn.invars[1].aval, AbstractRef):
        return _call(
            self, _multiply, eqn, token, acc=acc, a=_resolve(eqn, 1, a, transforms[1]), b=b
        ), []
    return _call(self, _multiply, eqn, token, acc=acc, a=a, b=b), []


def _multiply(
    *,
    token: jax.Array,
    mesh_location: Any,
    thread: Any,
    acc: Any,
    a: Any,
    b: Any,
    source_info: Any,
) -> jax.Array:
    """acc += a @ b, with b and perhaps a in shared memory: each a key and transforms.

    Matrix units read shared memory through another proxy than loads do. They may go on reading
    until the product is awaited.
    """
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    clock = _begin(thread)

    def operand(where: Any) -> Any:
        place = _Place(where, thread, info)
        gpu_callbacks.get_races().check_read(
            *(thread, clock.async_smem_clock.copy(), place.key, place.access),
            source_info=source_info,
        )
        return place.read()

    out = _Place(acc, thread, info)
    old = out.read()
    left = operand(a) if isinstance(a, tuple) else a
    out.write(old + np.matmul(left, operand(b), dtype=old.dtype))
    _on_their_way("products", thread).append(clock)
    return token


_read_known_accumulator = jaxpr_interpret.JaxprInterpreter._interpret_wgmma_accumulator_deref_p


def _read_accumulator(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    num_left = eqn.params["wait_n"]
    if num_left is not None:
        token = _await(self, eqn, token, "products", num_left)
    return _read_known_accumulator(self, eqn, token, get_invals)


def _wait_products(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    del get_invals
    return _await(self, eqn, token, "products", eqn.params["n"]), []


def _copy(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """A copy to shared memory without a barrier: cp.async."""
    assert not eqn.params["has_user_predicate"], eqn
    source, target, *leaves = get_invals()
    trees = [eqn.params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    source = _resolve(eqn, 0, source, transforms[0])
    target = _resolve(eqn, 1, target, transforms[1])
    return _call(self, _copy_now, eqn, token, source=source, target=target), []


def _copy_now(
    *,
    token: jax.Array,
    mesh_location: Any,
    thread: Any,
    source: Any,
    target: Any,
    source_info: Any,
) -> jax.Array:
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    races, clock = gpu_callbacks.get_races(), _begin(thread)
    read, written = (_Place(where, thread, info) for where in (source, target))
    for check, place in ((races.check_read, read), (races.check_write, written)):
        check(
            *(thread, clock.generic_clock.copy(), place.key, place.access), source_info=source_info
        )
    value = read.read()
    assert value is not None and value.shape == read.access.shape, "a copy from out of bounds"
    written.write(value)
    _on_their_way("copies", thread).append(clock)
    return token


def _wait_copies(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    del get_invals
    return _await(self, eqn, token, "copies", eqn.params["n"]), []


_RULES: dict[Any, Callable[..., Any]] = {
    run_state_p: _run_state,
    primitives.wgmma_ref_p: _wgmma,
    primitives.wgmma_accumulator_deref_p: _read_accumulator,
    primitives.wgmma_wait_p: _wait_products,
    primitives.copy_gmem_to_smem_p: _copy,
    primitives.wait_gmem_to_smem_p: _wait_copies,
}
