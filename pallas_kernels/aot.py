"""Compiles programs for chips that are not here: the real compilers on devices that only compile.

The compilers are no part of the environment that serves. `scripts/with_compilers` installs them on
first use and runs a Python program that finds them, with the arguments of `python`:

    scripts/with_compilers -m pytest tests/compile

    compiled = compile_for(CHIPS["v6e"], jax.jit(step, donate_argnums=0), *shapes)
    compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()

    mesh = make_mesh(CHIPS["h100"], {"data": 1, "model": 8})
    compile_for(CHIPS["h100"], step, *shapes_with_shardings, mesh=mesh)

What the chip cannot do fails as it would there: memory that a kernel has not got, tiles that it
cannot address, operations that it lacks. One program at a time in a process: XLA's flags, and
libtpu's, are read when its compiler is first used.
"""

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.chips import CHIPS, Chip

# Chip -> number of devices -> the smallest slice that has them. Each chip of tpu7x is two devices.
_TPU_SLICES = {
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4", 64: "8x8"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
    "v6e": {4: "2x2", 8: "2x4", 16: "4x4", 64: "8x8"},
    "tpu7x": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4"},
}


class _GpuFigures(NamedTuple):
    """What XLA wants to know of a GPU beside the figures of its `Chip`."""

    kind: str
    boost_ghz: float
    float32_lanes: int
    threads: int
    l2_bytes: int
    memory_bytes: int
    shared_memory_bytes: int


# As the CUDA driver reports them; lanes, threads and shared memory are of one multiprocessor.
_GPUS = {
    "a100": _GpuFigures(
        "NVIDIA A100-SXM4-80GB", 1.41, 64, 2048, 41_943_040, 85_100_068_864, 167_936
    ),
    "l4": _GpuFigures("NVIDIA L4", 2.04, 128, 1536, 50_331_648, 23_609_475_072, 102_400),
    "h100": _GpuFigures(
        "NVIDIA H100 80GB HBM3", 1.98, 128, 2048, 52_428_800, 84_942_979_072, 233_472
    ),
    "h200": _GpuFigures("NVIDIA H200", 1.98, 128, 2048, 52_428_800, 151_397_597_184, 233_472),
    "b200": _GpuFigures("NVIDIA B200", 1.965, 128, 2048, 132_644_864, 191_514_411_008, 233_472),
}

# The chips that can be compiled for: every accelerator of `CHIPS`.
COMPILED_CHIPS = {name: CHIPS[name] for name in (*_TPU_SLICES, *_GPUS)}


class CompilerMissingError(RuntimeError):
    """The compiler of a chip is not installed, or this program was not told where it is."""


def missing_reason(chip: Chip) -> str | None:
    """Why nothing can be compiled for `chip` here, or None when it can."""
    if chip.name not in COMPILED_CHIPS:
        return f"no program is compiled for {chip.name} ahead of time: {', '.join(COMPILED_CHIPS)}"
    compiler = "libtpu" if chip.platform == "tpu" else "jax_plugins.xla_cuda12"
    if _is_installed(compiler):
        return None
    return (
        f"{compiler}, the compiler for {chip.name}, is not installed or not found: "
        "run this with scripts/with_compilers instead of python"
    )


def devices(chip: Chip, count: int = 1) -> list[jax.Device]:
    """`count` devices of `chip` that programs can be compiled for, and cannot be run on.

    Raises:
        CompilerMissingError: the compiler of `chip` is not there.
        ValueError: more devices than the largest slice known here has.
    """
    reason = missing_reason(chip)
    if reason is not None:
        raise CompilerMissingError(reason)
    return list(_devices(chip, count))


def make_mesh(chip: Chip, axes: Mapping[str, int]) -> Mesh:
    """A mesh of compile-only devices of `chip`; `axes`: name -> length, outermost first."""
    shape = tuple(axes.values())
    return Mesh(np.array(devices(chip, math.prod(shape))).reshape(shape), tuple(axes))


def lower_for(
    chip: Chip, fn: Callable[..., Any], *args: Any, mesh: Mesh | None = None
) -> jax.stages.Lowered:
    """`fn` lowered for devices of `chip`; `.compile()` runs the compiler.

    Args:
        fn: a function, or what `jax.jit` made of one where it donates or has static arguments.
        args: pytrees of `jax.ShapeDtypeStruct`; one without a sharding lies whole on every device.
        mesh: as `make_mesh` gives it, when the program runs on more than one device.

    Raises:
        CompilerMissingError: the compiler of `chip` is not there.
    """
    mesh = mesh or make_mesh(chip, {"device": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or whole),
        args,
    )
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    platform = "tpu" if chip.platform == "tpu" else "cuda"
    with lowering_for(chip, mesh):
        return jitted.trace(*placed).lower(lowering_platforms=(platform,))


@contextlib.contextmanager
def lowering_for(chip: Chip, mesh: Mesh) -> Iterator[None]:
    """Inside, whatever is traced and lowered for devices of `mesh` is lowered for `chip`."""
    # Pallas asks the mesh that it is traced and lowered under.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _mosaic_lowers_for(chip):
        yield


def compile_for(
    chip: Chip, fn: Callable[..., Any], *args: Any, mesh: Mesh | None = None
) -> jax.stages.Compiled:
    """`fn` compiled for devices of `chip`; arguments and errors are those of `lower_for`.

    Whatever the compiler refuses is raised in its own words.
    """
    return lower_for(chip, fn, *args, mesh=mesh).compile()


@contextlib.contextmanager
def _mosaic_lowers_for(chip: Chip) -> Iterator[None]:
    """Mosaic GPU takes every device that only compiles for a Hopper: it is told the capability."""
    if chip.platform != "gpu":
        yield
        return
    from jax.experimental.mosaic.gpu import utils

    infer = utils._infer_arch
    utils._infer_arch = lambda: chip.capability
    try:
        yield
    finally:
        utils._infer_arch = infer


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is part of
        return False


@functools.cache
def _devices(chip: Chip, count: int) -> tuple[jax.Device, ...]:
    if chip.platform == "gpu":
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=_gpu_target(chip), topology=f"1x1x{count}"
        )
        return tuple(topology.devices)
    slices = _TPU_SLICES[chip.name]
    size = next((size for size in slices if size >= count), None)
    if size is None:
        raise ValueError(f"{count} devices of {chip.name} are more than the {max(slices)} known")
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip.name}:{slices[size]}"
    )
    return tuple(topology.devices)[:count]


def _gpu_target(chip: Chip) -> str:
    """XLA's description of a GPU, in the text format of its GpuTargetConfigProto."""
    gpu, (major, minor) = _GPUS[chip.name], chip.capability
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.core_memory_bytes}
  shared_memory_per_core: {gpu.shared_memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {chip.num_cores}
  fpus_per_core: {gpu.float32_lanes}
  clock_rate_ghz: {gpu.boost_ghz}
  memory_bandwidth: {int(chip.hbm_bytes_per_s)}
  l2_cache_size: {gpu.l2_bytes}
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.kind}"
"""
