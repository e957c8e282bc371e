"""The chips that kernels are made for: what they can do, and how JAX calls them."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device, as one JAX device sees it.

    Sources: jax's `TpuInfo`, NVIDIA's data sheets.

    platform: "tpu", "gpu" or "cpu".
    hbm_bytes_per_s: peak bandwidth of device memory.
    matmul_flops: dense bfloat16 operations per second.
    num_cores: TensorCores or streaming multiprocessors that share the device's memory.
    core_memory_bytes: a core's own memory that a kernel may use: VMEM, or the shared memory of one
      thread block.
    capability: CUDA compute capability, (0, 0) where there is none.
    """

    name: str
    platform: str
    hbm_bytes_per_s: float
    matmul_flops: float
    num_cores: int
    core_memory_bytes: int
    capability: tuple[int, int] = (0, 0)


_MIB = 2**20
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("cpu", "cpu", 5e10, 5e11, 1, _MIB),
        Chip("v5e", "tpu", 8.19e11, 1.97e14, 1, 128 * _MIB),
        Chip("v5p", "tpu", 2.46e12, 4.59e14, 2, 64 * _MIB),
        Chip("v6e", "tpu", 1.64e12, 9.20e14, 1, 128 * _MIB),
        Chip("tpu7x", "tpu", 3.70e12, 1.155e15, 1, 64 * _MIB),
        Chip("a100", "gpu", 2.04e12, 3.12e14, 108, 166_912, (8, 0)),
        Chip("l4", "gpu", 3.00e11, 1.21e14, 58, 101_376, (8, 9)),
        Chip("h100", "gpu", 3.35e12, 9.89e14, 132, 232_448, (9, 0)),
        Chip("h200", "gpu", 4.80e12, 9.89e14, 132, 232_448, (9, 0)),
        Chip("b200", "gpu", 7.67e12, 2.25e15, 148, 232_448, (10, 0)),
    )
}

# Part of a device kind -> chip; the longer of two alike comes first.
_TPU_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v6": "v6e", "tpu7x": "tpu7x"}


def chip_of(platform: str, device_kind: str, compute_capability: str = "") -> Chip:
    """The chip that JAX calls `device_kind`.

    One that is not listed keeps its kind as name and has the figures of one like it: a GPU those of
    the listed one of its compute capability; else, those of the platform's smallest.

    compute_capability: as `jax.Device.compute_capability` has it, such as "9.0".
    """
    if platform == "cpu":
        return CHIPS["cpu"]
    if platform == "tpu":
        found = (name for part, name in _TPU_KINDS.items() if part in device_kind.lower())
        return CHIPS.get(next(found, ""), _smallest(platform, device_kind, (0, 0)))
    for word in re.split(r"[\s-]+", device_kind.lower()):
        if word in CHIPS:
            return CHIPS[word]
    digits = re.fullmatch(r"(\d+)\.(\d+)", compute_capability)  # else another maker's names
    capability = (int(digits[1]), int(digits[2])) if digits else (0, 0)
    like = (chip for chip in CHIPS.values() if chip.platform == platform)
    alike = next((chip for chip in like if chip.capability == capability), None)
    if alike is not None:
        return dataclasses.replace(alike, name=device_kind)
    return _smallest(platform, device_kind, capability)


def _smallest(platform: str, name: str, capability: tuple[int, int]) -> Chip:
    chips = [chip for chip in CHIPS.values() if chip.platform == platform]
    smallest = min(chips, key=lambda chip: chip.hbm_bytes_per_s)
    return dataclasses.replace(smallest, name=name, capability=capability)
