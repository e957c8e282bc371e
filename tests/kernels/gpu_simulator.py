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
        patch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_wgmma_ref_p", _wgmma)
        yield


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
