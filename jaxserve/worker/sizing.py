"""Derives what depends on devices: dtype, limits, kernels, and how many KV blocks fit."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil

from jaxserve.config import EngineConfig, replace
from jaxserve.errors import UserError
from jaxserve.models.partition import partition
from jaxserve.worker.process_group import MAX_CPU_DEVICES
from pallas_kernels.chips import Chip, chip_of
from pallas_kernels.matmul import MatmulCall
from pallas_kernels.matmul import explain as explain_matmul
from pallas_kernels.matmul.cpu import has_tiles
from pallas_kernels.ragged_paged_attention import (
    AttentionCall,
    KVCacheLayout,
    explain,
    unsupported_reason,
)

logger = logging.getLogger(__name__)

_GIB = 2**30
_CPU_CACHE_BYTES = 2 * _GIB  # a CPU's memory is not ours to fill
# Token slots of a step by products in C, which take as long for 8 rows; what XLA does around them
# does not. Not one: for arrays with such an axis XLA rounds in other places than for all others,
# and an answer would depend on what runs beside it.
TINY_BUCKET = 2
_MIXED_TOKENS_BY_TILES = 112  # then p99 of gaps is below three medians at half load
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True)
class _PlatformDefaults:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    smallest_bucket: int
    jump_ahead_tokens: int  # while a step reads the weights, it has time for so many tokens
    dtype: str
    dtype_reason: str


_DEFAULTS = {
    "cpu": _PlatformDefaults(
        32,
        32,
        512,
        64,
        8,
        8,
        "bfloat16",
        "half the bytes of float32",
    ),
    "gpu": _PlatformDefaults(64, 256, 2048, 2048, 16, 256, "bfloat16", "the matrix units' type"),
    "tpu": _PlatformDefaults(128, 256, 2048, 2048, 16, 256, "bfloat16", "the matrix units' type"),
}


def find_devices(config: EngineConfig) -> list[jax.Device]:
    """The devices of the mesh, those of the other processes too.

    Raises:
      UserError: JAX cannot start, starts on a platform that nothing here is made for, or has too
        few devices.
    """
    count = config.parallel.num_devices
    # JAX would keep a quarter of a GPU's memory from us; --memory-utilization says how much to use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"JAX cannot start (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}): "
            f"{' '.join(str(error).split()) or type(error).__name__}.",
            fix="Install JAX for the device, or set JAX_PLATFORMS=cpu.",
        ) from error
    platform = platform_of(devices[0])
    if platform not in _DEFAULTS:
        raise UserError(
            f"JAX runs on platform {platform!r}, which jaxserve does not serve.",
            fix=f"Set JAX_PLATFORMS to one of {', '.join(_DEFAULTS)}.",
        )
    if platform == "cpu" and count > MAX_CPU_DEVICES:
        raise UserError(
            f"--mesh {config.parallel.mesh} needs {count} devices, but a CPU shows itself as "
            f"{MAX_CPU_DEVICES} at most.",
            fix=f"Use --mesh 1x{MAX_CPU_DEVICES}.",
        )
    if len(devices) < count:
        raise UserError(
            f"--mesh {config.parallel.mesh} needs {count} devices, but JAX has {len(devices)}.",
            fix=f"Use --mesh 1x{len(devices)}"
            + (", or do not use JAX before." if platform == "cpu" else "."),
        )
    return devices[:count]


def platform_of(device: jax.Device) -> str:
    """ "cpu", "gpu" or "tpu"."""
    is_gpu = device.platform in ("cuda", "rocm")
    return "gpu" if is_gpu else str(device.platform)


def chip_of_device(device: jax.Device) -> Chip:
    """What kernels know of `device`."""
    capability = str(getattr(device, "compute_capability", ""))
    return chip_of(platform_of(device), device.device_kind, capability)


def smallest_bucket(platform: str) -> int:
    """Fewest token slots of a step, but for `TINY_BUCKET`. On CPUs XLA's products of one row of
    bfloat16 are slow, of 8 fast."""
    return _DEFAULTS[platform].smallest_bucket


def resolve_for_device(config: EngineConfig, device: jax.Device) -> EngineConfig:
    """Everything but the number of KV blocks; each derived value is logged with its reason.

    Raises:
      UserError: a named implementation cannot run this model here, or limits that do not fit each
        other.
    """
    platform = platform_of(device)
    if config.model.quantization != "none" and platform != "cpu":
        raise UserError(
            f"--quantization {config.model.quantization} is for CPUs: the compiler for a "
            f"{platform} would write the weights anew in every step.",
            fix="Leave --quantization out.",
        )
    defaults = _DEFAULTS[platform]
    derived: dict[str, object] = {}

    def derive(name: str, value: object, reason: str) -> None:
        derived[name] = value
        logger.info("%s = %s: %s", name, value, reason)

    on_platform = f"default on {platform}"
    if config.model.dtype == "auto":
        derive("dtype", defaults.dtype, f"{on_platform}, {defaults.dtype_reason}")
    if not config.cache.block_size:
        derive("block_size", defaults.block_size, on_platform)
    if not config.scheduler.max_num_seqs:
        most = config.scheduler.max_num_batched_tokens or defaults.max_num_seqs
        derive("max_num_seqs", min(most, defaults.max_num_seqs), on_platform)
    if not config.scheduler.max_num_batched_tokens:
        wanted = max(defaults.max_num_batched_tokens, config.scheduler.max_num_seqs)
        derive("max_num_batched_tokens", wanted, on_platform)
    if not config.scheduler.max_num_mixed_tokens:
        dtype = derived.get("dtype", config.model.dtype)
        if (platform, dtype) == ("cpu", "bfloat16") and has_tiles():
            reason = f"{on_platform} with a unit for tiles of bfloat16"
            derive("max_num_mixed_tokens", _MIXED_TOKENS_BY_TILES, reason)
        else:
            derive("max_num_mixed_tokens", defaults.max_num_mixed_tokens, on_platform)
    if not config.scheduler.jump_ahead_tokens:
        derive("jump_ahead_tokens", defaults.jump_ahead_tokens, on_platform)
    config = replace(config, **derived)
    if config.parallel.num_devices > 1:
        logger.info("mesh = %s: %s", config.parallel.mesh, _describe_mesh(config))
    if config.scheduler.max_num_batched_tokens < config.scheduler.max_num_seqs:
        raise UserError(
            f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens} is less than "
            f"--max-num-seqs {config.scheduler.max_num_seqs}: a step cannot serve every request.",
            fix=f"Use --max-num-batched-tokens {config.scheduler.max_num_seqs} or more.",
        )
    chip = chip_of_device(device)
    attention, matmul = _resolve_attention(config, chip), _resolve_matmul(config, chip)
    return replace(config, attention=attention, matmul=matmul)


def _describe_mesh(config: EngineConfig) -> str:
    """What each device has, and why."""
    info, num_devices = config.info, config.parallel.num_devices
    cut = partition(info, num_devices)
    words = f"each device has 1/{num_devices} of the weights"
    copies = int((cut.kv_heads == 0).sum())
    if copies > 1:
        words += f"; {copies} have the same KV head, as there are {info.num_kv_heads} KV heads"
    dummies = int((cut.q_heads < 0).sum())
    if dummies:
        words += f"; {dummies} dummy query heads, as {info.num_heads} do not divide"
    if info.vocab_size % num_devices:
        words += f"; all have the whole vocabulary, as {info.vocab_size} tokens do not divide"
    return words


def attention_call(config: EngineConfig, chip: Chip) -> AttentionCall:
    """The attention call that this model makes on each device."""
    cut = partition(config.info, config.parallel.num_devices)
    return AttentionCall(
        layout=kv_cache_layout(config, chip.platform),
        chip=chip,
        num_heads=cut.q_heads.size // cut.num_parts,
        q_dtype=jnp.dtype(config.model.dtype),
    )


def kv_cache_layout(config: EngineConfig, platform: str) -> KVCacheLayout:
    """How one device's share of this model's KV cache lies in memory."""
    info = config.info
    cut = partition(info, config.parallel.num_devices)
    return KVCacheLayout.for_platform(
        platform,
        info.num_layers,
        len(cut.kv_heads) // cut.num_parts,
        info.head_dim,
        config.model.dtype,
        config.cache.block_size,
    )


def _resolve_attention(config: EngineConfig, chip: Chip) -> str:
    call = attention_call(config, chip)
    asked = config.worker.attention
    if asked != "auto":
        reason = unsupported_reason(asked, call)
        if reason is not None:
            raise UserError(f"--attention {asked}: {reason}.", fix="Use --attention auto.")
        return asked
    explanation = explain(call)
    assert explanation.chosen is not None, str(explanation)
    logger.info("attention = %s: best of what runs here", explanation)
    return explanation.chosen


def _resolve_matmul(config: EngineConfig, chip: Chip) -> str:
    """The implementation of products with weights; XLA has those that it refuses."""
    info, model = config.info, config.model
    dtype = jnp.dtype(model.dtype if model.quantization == "none" else model.quantization)
    shape = (smallest_bucket(chip.platform), info.hidden_size, info.vocab_size)
    call = MatmulCall(chip, shape, dtype, config.parallel.num_devices)
    explanation = explain_matmul(call)
    asked = config.worker.matmul
    if asked != "auto":
        if reason := explanation.refused.get(asked):
            raise UserError(f"--matmul {asked}: {reason}.", fix="Use --matmul auto.")
        return asked
    assert explanation.chosen is not None, str(explanation)
    if chip.platform == "cpu":  # elsewhere there is nothing to choose
        logger.info("matmul = %s: best of what runs here", explanation)
    if model.quantization != "none" and explanation.chosen == "xla":
        logger.warning("Without products in C, weights of int8 are slower than of bfloat16")
    return explanation.chosen


def memory_limit_bytes(devices: Sequence[jax.Device], workers_on_host: int = 1) -> int:
    """Bytes that each device of this process can still give: free memory, for a CPU within its
    container's limit.

    Raises:
      UserError: an accelerator that does not say.
    """
    mine = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() or {} for device in mine]
    if all("bytes_limit" in counts for counts in stats):
        return min(counts["bytes_limit"] - counts["bytes_in_use"] for counts in stats)
    if platform_of(devices[0]) != "cpu":
        raise UserError(
            f"Device {devices[0].device_kind} does not say how much memory it has.",
            fix="Leave XLA_PYTHON_CLIENT_ALLOCATOR unset.",
        )
    available = psutil.virtual_memory().available
    if _CGROUP_LIMIT.is_file():
        text = _CGROUP_LIMIT.read_text().strip()
        if text != "max":
            available = min(available, int(text) - psutil.Process().memory_info().rss)
    return available // (len(mine) * workers_on_host)


def blocks_per_sequence(config: EngineConfig) -> int:
    """Blocks of the longest sequence: the width of a block table."""
    return -(-config.model.max_model_len // config.cache.block_size)


@dataclasses.dataclass(frozen=True)
class KVBlocks:
    """How many KV blocks there are, null block included, and why.

    depends_on_step: the number would be another with another step_temp_bytes.
    """

    count: int
    bytes_per_block: int
    reason: str
    depends_on_step: bool


def size_kv_cache(
    config: EngineConfig, platform: str, free_bytes: int, step_temp_bytes: int
) -> KVBlocks:
    """The number of KV blocks.

    free_bytes: what each device has for the cache and for a step's temporaries.
    step_temp_bytes: what the largest step needs beside its arguments and results.

    Raises:
      UserError: the longest sequence does not fit; names the longest that does.
    """
    cache = config.cache
    bytes_per_block = kv_cache_layout(config, platform).bytes_per_page
    needed = blocks_per_sequence(config) + 1
    budget = int(free_bytes * cache.memory_utilization) - step_temp_bytes
    room = max(0, budget) // bytes_per_block
    flag = None  # what the operator set, and its largest value
    depends_on_step = False
    if cache.num_kv_blocks:
        room = max(0, free_bytes - step_temp_bytes) // bytes_per_block
        wanted, reason = cache.num_kv_blocks, "--num-kv-blocks"
        flag = f"--num-kv-blocks {room}"
    elif cache.kv_cache_memory_bytes:
        wanted = cache.kv_cache_memory_bytes // bytes_per_block
        reason = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"
        flag = f"--kv-cache-memory-bytes {room * bytes_per_block}"
    elif platform == "cpu" and budget > (
        cpu_bytes := _CPU_CACHE_BYTES // config.parallel.num_devices
    ):
        wanted = cpu_bytes // bytes_per_block
        reason = f"{_CPU_CACHE_BYTES / _GIB:.2f} GiB, the default on a CPU"
    else:
        wanted, depends_on_step = room, True
        reason = (
            f"{free_bytes / _GIB:.2f} GiB free x {cache.memory_utilization} - "
            f"{step_temp_bytes / _GIB:.2f} GiB for the largest step"
        )
    count = min(wanted, room)
    cut = f" and {flag}" if flag and wanted > room else ""
    if count < needed:
        raise _too_long(config, needed, count, room, bytes_per_block, cut)
    if cut:
        raise UserError(
            f"{reason} asks for {wanted * bytes_per_block / _GIB:.2f} GiB of KV cache, but there "
            f"is room for {room * bytes_per_block / _GIB:.2f} GiB.",
            fix=f"Use {flag} or less.",
        )
    return KVBlocks(count, bytes_per_block, reason, depends_on_step)


def _too_long(
    config: EngineConfig, needed: int, count: int, room: int, bytes_per_block: int, cut: str
) -> UserError:
    """The longest sequence needs more blocks than `count`, which is at most `room`.

    cut: what else must shrink, for the fix.
    """
    fits = max(0, count - 1) * config.cache.block_size
    if fits > 1:
        fix = f"Use --max-model-len {fits}{cut}, or give the KV cache more memory."
    elif config.cache.num_kv_blocks and needed <= room:
        fix = f"Use --num-kv-blocks {needed} or more."
    else:
        fix = (
            "Give the KV cache more memory, use a smaller --max-num-batched-tokens, or a smaller "
            "model."
        )
    return UserError(
        f"--max-model-len {config.model.max_model_len} needs {needed} KV blocks "
        f"({needed * bytes_per_block / _GIB:.2f} GiB), but there is room for {count} "
        f"({count * bytes_per_block / _GIB:.2f} GiB).",
        fix=fix,
    )
