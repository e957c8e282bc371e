"""JAX's simulator of GPUs, with what it lacks that the kernels use."""

import contextlib
import functools
from collections.abc import Iterator
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


@contextlib.contextmanager
def simulate() -> Iterator[None]:
    """Kernels traced in this context run in the simulator, which fails on a data race."""
    with (
        pytest.MonkeyPatch.context() as patch,
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        interpreter = jaxpr_interpret.JaxprInterpreter
        patch.setattr(interpreter, "_interpret_wgmma_ref_p", _wgmma)
        patch.setattr(interpreter, "_interpret_inline_mgpu_p", _run_state_or_relabel)
        patch.setattr(interpreter, "interpret", _interpret)
        yield


_interpret_known = jaxpr_interpret.JaxprInterpreter.interpret


def _interpret(self: Any, jaxpr: Any, token: jax.Array, *args: Any) -> Any:
    """Interprets `run_state`, which it has no rule for, by the rule of another primitive."""

    def known(eqn: Any) -> Any:
        is_run_state = eqn.primitive is run_state_p
        return eqn.replace(primitive=primitives.inline_mgpu_p) if is_run_state else eqn

    return _interpret_known(
        self, jaxpr.replace(eqns=[known(eqn) for eqn in jaxpr.eqns]), token, *args
    )


def _run_state_or_relabel(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """`run_state`, or inline code of a kernel: what there is takes an array to another layout."""
    if "is_initialized" in eqn.params:
        return _run_state(self, eqn, token, get_invals)
    (value,), (out,) = get_invals(), eqn.outvars
    assert (value.shape, value.dtype) == (out.aval.shape, out.aval.dtype), eqn
    return token, [value]


def _run_state(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """`run_state`: every operand that is no reference becomes a buffer in registers."""
    assert all(eqn.params["is_initialized"]), eqn
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

_wgmma_of_refs = jaxpr_interpret.JaxprInterpreter._interpret_wgmma_ref_p


def _wgmma(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    """wgmma whose left operand may be in registers."""
    if isinstance(eqn.invars[1].aval, AbstractRef):
        return _wgmma_of_refs(self, eqn, token, get_invals)
    assert eqn.primitive is primitives.wgmma_ref_p
    acc, a, b, *leaves = get_invals()
    assert eqn.params["acc_transforms_tree"] is None, "only whole accumulators"
    b_transforms = jax.tree.unflatten(eqn.params["b_transforms_tree"], leaves)
    return callback.io_callback(
        functools.partial(_multiply, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        acc_key=acc,
        a=a,
        b_key=b,
        b_transforms=b_transforms,
    ), []


@gpu_callbacks.fail_on_exception
def _multiply(
    *,
    token: jax.Array,
    mesh_location: Any,
    thread: Any,
    acc_key: jax.Array,
    a: jax.Array,
    b_key: jax.Array,
    b_transforms: Any,
    source_info: Any,
) -> jax.Array:
    """acc += a @ b with b in shared memory."""
    memory: Any = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)

    def read(key: Any, transforms: Any) -> tuple[Any, Any]:
        where = memory.access(key, transforms)
        return where, memory.get_buffer_content(key, where, thread, logging_info=info)[0]

    acc_id, b_id = (shared_memory.HostAllocationKey.from_array(k) for k in (acc_key, b_key))
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(b_transforms))
    _, b = read(b_id, transforms)
    where, acc = read(acc_id, ())
    product = acc + np.matmul(a, b, dtype=acc.dtype)
    memory.store_buffer_content(acc_id, where, product, thread, logging_info=info)
    return token
