"""Loads a checkpoint into a model's parameter arrays, one tensor at a time."""

import concurrent.futures
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Shaped

from jaxserve.checkpoint import open_weights
from jaxserve.checkpoint.weights import WeightReader, check_weight_names
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from jaxserve.models.registry import ParamSpec, model_for

logger = logging.getLogger(__name__)


def param_shapes(info: ModelInfo, dtype: jax.typing.DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter, without reading any."""
    specs = model_for(info).param_specs(info)
    return {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in specs.items()}


def load_params(
    info: ModelInfo, dtype: jax.typing.DTypeLike, device: jax.Device
) -> dict[str, Array]:
    """The model's parameters on `device`.

    Raises:
      UserError: tensors are missing, unused or misshapen; names them.
    """
    started_s = time.perf_counter()
    specs = model_for(info).param_specs(info)
    reader = open_weights(info.path)
    check_weight_names(_tensor_names(info, specs), reader)
    params = {}
    for name, spec in specs.items():
        params[name] = jax.device_put(_read_param(spec, reader, jnp.dtype(dtype)), device)
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
