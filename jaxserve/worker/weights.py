"""Loads a checkpoint into a model's parameter arrays, one tensor at a time."""

import concurrent.futures
import logging
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, Sharding
from jaxtyping import Shaped

from jaxserve.checkpoint import open_weights
from jaxserve.checkpoint.weights import WeightReader, check_weight_names
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from jaxserve.models.registry import ParamSpec, model_for
from jaxserve.worker.sharding import num_parts, param_shardings

logger = logging.getLogger(__name__)

_LINE_BYTES = 64


def param_shapes(
    info: ModelInfo, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of each parameter, without reading any."""
    specs = model_for(info).param_specs(info, num_parts(mesh))
    shardings = param_shardings(specs, mesh)
    return {
        name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=shardings[name])
        for name, spec in specs.items()
    }


def load_params(info: ModelInfo, dtype: jax.typing.DTypeLike, mesh: Mesh) -> dict[str, Array]:
    """The model's parameters, each device with its share.

    Raises:
      UserError: tensors are missing, unused or misshapen; names them.
    """
    started_s = time.perf_counter()
    specs = model_for(info).param_specs(info, num_parts(mesh))
    shardings = param_shardings(specs, mesh)
    reader = open_weights(info.path)
    check_weight_names(_tensor_names(info, specs), reader)
    params = {}
    for name, spec in specs.items():
        params[name] = _read_param(spec, reader, jnp.dtype(dtype), shardings[name])
    num_bytes = sum(p.nbytes for p in params.values())
    logger.info(
        "Weights: %.2f GiB as %s in %.1f s",
        num_bytes / 2**30,
        jnp.dtype(dtype).name,
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


def _read_param(
    spec: ParamSpec, reader: WeightReader, dtype: np.dtype, sharding: Sharding
) -> Shaped[Array, "..."]:
    """Reads one parameter; its layers in parallel, as reading drops the GIL.

    Of each layer only what this process's devices have stays in memory.
    """
    places = sharding.addressable_devices_indices_map(spec.shape)
    part_shape = sharding.shard_shape(spec.shape)
    parts = {place: _empty_lines(part_shape, dtype) for place in places.values()}
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
        for place, part in parts.items():
            assert place is not None
            if spec.is_stacked:
                part[i] = array[place[1:]]
            else:
                part[...] = array[place]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(read_layer, range(spec.shape[0] if spec.is_stacked else 1)))
    return jax.make_array_from_single_device_arrays(
        spec.shape,
        sharding,
        [jax.device_put(parts[place], device) for device, place in places.items()],
    )
