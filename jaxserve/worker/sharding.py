"""Which device holds what: one mesh, and one table from the axes of arrays to those of the mesh.

With one device nothing is sharded: every function below then gives that device alone, and programs
compile as if there were no mesh.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Shaped

from jaxserve.models.registry import ParamSpec
from pallas_kernels.ragged_paged_attention import KVCache, KVCacheLayout

AXES = ("data", "model")

# Logical axis of a parameter -> mesh axis. Those that are not here are whole on every device.
_MESH_AXES = {
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "parts": "model",
    "vocab": "model",
}


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of `devices`, all of them along "model"."""
    return Mesh(np.array(devices).reshape(1, -1), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def num_parts(mesh: Mesh) -> int:
    """Devices along "model": parts into which a model is cut."""
    return mesh.shape["model"]


def place(mesh: Mesh, *axes: str | None) -> Sharding:
    """The sharding that splits an array's axes over the mesh axes of these names; None: whole."""
    if mesh.size == 1:
        return jax.sharding.SingleDeviceSharding(mesh.devices.item())
    return NamedSharding(mesh, PartitionSpec(*axes))


def upload(
    array: Shaped[np.ndarray, "*S"], sharding: Sharding
) -> Shaped[Array, "*S"] | Shaped[np.ndarray, "*S"]:
    """Each device's share of an array that every process has whole, as an argument of a program."""
    if sharding.num_devices == 1:
        return array  # the call uploads it, in a tenth of the time that JAX takes here
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def without_last_axis(sharding: Sharding) -> Sharding:
    """Of arrays that lack it, and are whole where only it is split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))


def keep_whole[Tree](mesh: Mesh, tree: Tree) -> Tree:
    """Small arrays of a traced program that each device shall have and compute whole."""
    if mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, place(mesh))


def vocab_parts(vocab_size: int, mesh: Mesh) -> int:
    """Parts in which devices hold logits, the embedding and the LM head; one where the mesh does
    not divide the vocabulary: then each device has, and computes, all of them."""
    return num_parts(mesh) if vocab_size % num_parts(mesh) == 0 else 1


def by_vocab(vocab_size: int, mesh: Mesh) -> Sharding:
    """Of arrays [lines, V] that have an entry a token of the vocabulary."""
    return place(mesh, None, "model" if vocab_parts(vocab_size, mesh) > 1 else None)


def param_shardings(specs: Mapping[str, ParamSpec], mesh: Mesh) -> dict[str, Sharding]:
    """The sharding of each parameter."""

    def mesh_axis(axis: str | None, size: int) -> str | None:
        if axis == "vocab" and vocab_parts(size, mesh) == 1:
            return None
        return _MESH_AXES.get(axis or "")

    return {
        name: place(mesh, *map(mesh_axis, spec.axes, spec.shape)) for name, spec in specs.items()
    }


def kv_cache_spec(layout: KVCacheLayout) -> KVCache:
    """How the arrays of a KV cache are split: by KV head, each device a `layout` of its own."""
    axes = ["model" if i == layout.heads_axis else None for i in range(len(layout.axes))]
    return KVCache(PartitionSpec(*axes), PartitionSpec(*axes))


def kv_cache_shapes(layout: KVCacheLayout, num_pages: int, mesh: Mesh) -> KVCache:
    """Shapes and shardings of a cache of which each device holds a `layout`."""

    def whole(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        shape[layout.heads_axis] *= num_parts(mesh)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place(mesh, *spec))

    return KVCache(*map(whole, layout.shape(num_pages), kv_cache_spec(layout)))


def device_bytes(tree: object) -> int:
    """Bytes that arrays, or shapes with shardings, take on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        total += int(np.prod(shape)) * leaf.dtype.itemsize
    return total
