"""Loads a checkpoint into a model's parameter arrays, one tensor at a time."""

import concurrent.futures
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Shaped

from jaxserve.checkpoint import open_weights
from jaxserve.checkpoint.weights import WeightReader, check_weight_names
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from jaxserve.models.registry import ParamSpec, model_for
from jaxserve.worker.sharding import num_parts, param_shardings, upload

logger = logging.getLogger(__name__)


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
        host = _read_param(spec, reader, jnp.dtype(dtype))
        params[name] = upload(host, shardings[name])
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


def _read_param(
    spec: ParamSpec, reader: WeightReader, dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
    """Reads one parameter; its layers in parallel, as reading drops the GIL."""
    host = np.empty(spec.shape, dtype)
    layers = host if spec.is_stacked else host[None]

    def read_layer(i: int) -> None:
        names = [source.format(i=i) for source in spec.sources]
        tensors = [reader.read(name) for name in names]
        try:
            array = spec.assemble(*tensors) if spec.assemble else tensors[0]
        except ValueError:  # shapes that do not even go together
            array = None
        if array is None or array.shape != layers.shape[1:]:
            shapes = ", ".join(f"{n} {t.shape}" for n, t in zip(names, tensors, strict=True))
            raise UserError(
                f"The checkpoint {reader.path} has {shapes}, but its config asks for "
                f"{layers.shape[1:]}.",
                fix="Use a checkpoint whose config belongs to its weights.",
            )
        layers[i] = array

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(read_layer, range(len(layers))))
    return host
