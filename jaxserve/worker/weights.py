"""Loads a checkpoint into a model's parameter arrays, one tensor at a time."""

import concurrent.futures
import logging
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, Sharding
from jaxtyping import Float, Float32, Int8, Shaped

from jaxserve.checkpoint import open_weights
from jaxserve.checkpoint.weights import WeightReader, check_weight_names
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from jaxserve.models.registry import ParamSpec, model_for
from jaxserve.worker.sharding import num_parts, param_shardings, without_last_axis
from pallas_kernels.matmul import Int8Weights

logger = logging.getLogger(__name__)

_LINE_BYTES = 64
_QUANTIZED_AT_ONCE = 1 << 20  # weights, in float32


def param_shapes(
    info: ModelInfo, dtype: jax.typing.DTypeLike, mesh: Mesh, quantization: str = "none"
) -> dict[str, Any]:
    """Shape, dtype and sharding of each parameter, without reading any."""
    specs = model_for(info).param_specs(info, num_parts(mesh))
    shardings = param_shardings(specs, mesh)
    return {
        name: _param_shape(spec, dtype, shardings[name], quantization)
        for name, spec in specs.items()
    }


def _param_shape(
    spec: ParamSpec, dtype: jax.typing.DTypeLike, sharding: Sharding, quantization: str
) -> jax.ShapeDtypeStruct | Int8Weights:
    if quantization == "none" or not spec.is_quantized:
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)
    assert quantization == "int8", quantization
    of_channels = without_last_axis(sharding)
    return Int8Weights(
        jax.ShapeDtypeStruct(spec.shape, jnp.int8, sharding=sharding),
        jax.ShapeDtypeStruct(spec.shape[:-1], jnp.float32, sharding=of_channels),
    )


def load_params(
    info: ModelInfo, dtype: jax.typing.DTypeLike, mesh: Mesh, quantization: str = "none"
) -> dict[str, Array | Int8Weights]:
    """The model's parameters, each device with its share.

    quantization: as `--quantization`.

    Raises:
      UserError: tensors are missing, unused or misshapen; names them.
    """
    started_s = time.perf_counter()
    specs = model_for(info).param_specs(info, num_parts(mesh))
    shapes = param_shapes(info, jnp.dtype(dtype), mesh, quantization)
    reader = open_weights(info.path)
    check_weight_names(_tensor_names(info, specs), reader)
    params = {name: _read_param(spec, reader, shapes[name]) for name, spec in specs.items()}
    num_bytes = sum(p.nbytes for p in jax.tree.leaves(params))
    logger.info(
        "Weights: %.2f GiB as %s in %.1f s",
        num_bytes / 2**30,
        jnp.dtype(dtype).name if quantization == "none" else quantization,
        time.perf_counter() - started_s,
    )
    return params


def _tensor_names(info: ModelInfo, specs: dict[str, ParamSpec]) -> set[str]:
    names = set()
    for spec in specs.values():
        layers = range(info.num_layers) if spec.is_stacked else range(1)
        names.update(source.format(i=i) for source in spec.sources for i in layers)
    return names


def _empty_lines(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """An array in whole lines of the cache: on a CPU JAX then takes it as it is, without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % _LINE_BYTES
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


class _Parts:
    """The parts of an array that this process's devices have."""

    def __init__(self, shape: jax.ShapeDtypeStruct):
        sharding = shape.sharding
        assert sharding is not None
        self._shape, self._sharding = shape.shape, sharding
        self._places = sharding.addressable_devices_indices_map(shape.shape)
        part_shape, dtype = sharding.shard_shape(shape.shape), np.dtype(shape.dtype)
        self._parts = {place: _empty_lines(part_shape, dtype) for place in self._places.values()}

    def fill(self, layer: int | None, array: Shaped[np.ndarray, "..."]) -> None:
        """With the whole array, or that of a layer of the first axis."""
        for place, part in self._parts.items():
            assert place is not None
            if layer is None:
                part[...] = array[place]
            else:
                part[layer] = array[place[1:]]

    def upload(self) -> Shaped[Array, "..."]:
        parts = [jax.device_put(self._parts[p], device) for device, p in self._places.items()]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)


def _quantize(
    array: Float[np.ndarray, "*O I"],
) -> tuple[Int8[np.ndarray, "*O I"], Float32[np.ndarray, "*O"]]:
    """As values * scales: the largest of a channel becomes 127 or -127."""
    rows = array.reshape(-1, array.shape[-1])
    values, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    step = max(1, _QUANTIZED_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float32)
        of_part = scales[start : start + step]
        np.divide(np.abs(part).max(axis=1), np.float32(127), out=of_part)
        np.divide(part, of_part[:, None], out=part, where=of_part[:, None] > 0)
        values[start : start + step] = np.rint(part, out=part)
    return values.reshape(array.shape), scales.reshape(array.shape[:-1])


def _read_param(
    spec: ParamSpec, reader: WeightReader, shape: jax.ShapeDtypeStruct | Int8Weights
) -> Shaped[Array, "..."] | Int8Weights:
    """Reads one parameter; its layers in parallel, as reading drops the GIL.

    Of each layer only what this process's devices have stays in memory.
    """
    parts = [_Parts(leaf) for leaf in jax.tree.leaves(shape)]
    layer_shape = spec.shape[1:] if spec.is_stacked else spec.shape

    def read_layer(i: int) -> None:
        names = [source.format(i=i) for source in spec.sources]
        tensors = [reader.read(name) for name in names]
        try:
            array = spec.assemble(*tensors) if spec.assemble else tensors[0]
        except ValueError:  # shapes that do not even go together
            array = None
        if array is None or array.shape != layer_shape:
            shapes = ", ".join(f"{n} {t.shape}" for n, t in zip(names, tensors, strict=True))
            raise UserError(
                f"The checkpoint {reader.path} has {shapes}, but its config asks for "
                f"{layer_shape}.",
                fix="Use a checkpoint whose config belongs to its weights.",
            )
        layer = i if spec.is_stacked else None
        arrays = _quantize(array) if isinstance(shape, Int8Weights) else (array,)
        for part, rounded in zip(parts, arrays, strict=True):
            part.fill(layer, rounded)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(read_layer, range(spec.shape[0] if spec.is_stacked else 1)))
    arrays = [part.upload() for part in parts]
    return jax.tree.unflatten(jax.tree.structure(shape), arrays)
