"""`jaxserve doctor`: what this machine offers, what jaxserve would choose here, and why."""

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve import __version__

if TYPE_CHECKING:
    from pallas_kernels.dispatch import Explanation

# An accelerator's device file, and the extra whose packages let JAX use it.
_ACCELERATORS = {"/dev/nvidiactl": "cuda12", "/dev/accel0": "tpu"}
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "numpy", "tokenizers", "msgspec")


def doctor(*, as_json: bool) -> int:
    """Prints the report; returns the exit code: 1 when JAX finds no usable device, else 0."""
    report = make_report()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(_as_text(report))
    return 1 if report["problem"] else 0


def make_report() -> dict[str, Any]:
    """Everything the command prints, as JSON types. Starts JAX, so it can take the accelerator."""
    report: dict[str, Any] = {
        "versions": _versions(),
        "host": _host(),
        "devices": [],
        "attention": {},
        "matmul": {},
        "caches": _caches(),
        "hint": None,
        "problem": None,
    }
    try:
        report["devices"] = _devices()
        report["attention"] = _attention()
        report["matmul"] = {"a few tokens": _matmul()}
        report["hint"] = _unused_accelerator(report["devices"])
    except (RuntimeError, AssertionError) as e:  # what JAX raises when a platform cannot start
        report["problem"] = f"JAX cannot start: {' '.join(str(e).split())}"
    return report


def _versions() -> dict[str, str]:
    versions = {"jaxserve": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _host() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system": platform.platform(),
        "executable": sys.executable,
        "num_cpus": psutil.cpu_count(),
        "memory_bytes": memory.total,
        "available_memory_bytes": memory.available,
    }


def _devices() -> list[dict[str, Any]]:
    """A device without a memory figure of its own (a CPU) uses the host's memory."""
    import jax

    devices = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        devices.append(
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_bytes": stats.get("bytes_limit"),
                "used_memory_bytes": stats.get("bytes_in_use"),
            }
        )
    return devices


def _attention() -> dict[str, Any]:
    """By model shape: what `--attention auto` chooses here, and why others are refused."""
    import jax

    from jaxserve.worker.sizing import chip_of_device
    from pallas_kernels.ragged_paged_attention import explain
    from pallas_kernels.ragged_paged_attention.specs import MODEL_SHAPES

    chip = chip_of_device(jax.local_devices()[0])
    return {name: _choice(explain(shape.call(chip))) for name, shape in MODEL_SHAPES.items()}


def _matmul() -> dict[str, Any]:
    """What `--matmul auto` chooses for a few tokens and bfloat16 weights, and why."""
    import jax
    import jax.numpy as jnp

    from jaxserve.worker.sizing import chip_of_device
    from pallas_kernels.matmul import MatmulCall, explain

    dtype = jnp.dtype(jnp.bfloat16)
    chip = chip_of_device(jax.local_devices()[0])
    return _choice(explain(MatmulCall(chip, (1, 576, 576), dtype, num_devices=1)))


def _choice(explanation: "Explanation") -> dict[str, Any]:
    return {"chosen": explanation.chosen, "refused": dict(explanation.refused)}


def _unused_accelerator(devices: list[dict[str, Any]]) -> str | None:
    for path, extra in _ACCELERATORS.items():
        if Path(path).exists() and all(device["platform"] == "cpu" for device in devices):
            return f"{path} is here but JAX uses the CPU: pip install 'jaxserve[{extra}]'"
    return None


def _caches() -> dict[str, Any]:
    from jaxserve.checkpoint import demo

    model = demo.find()
    return {"directory": str(demo.cache_dir()), "demo_model": str(model) if model else None}


def _as_text(report: dict[str, Any]) -> str:
    host, caches = report["host"], report["caches"]
    lines = [f"{name:<12} {version}" for name, version in report["versions"].items()]
    lines += [
        f"{'host':<12} {host['num_cpus']} CPUs, {_gib(host['available_memory_bytes'])} of "
        f"{_gib(host['memory_bytes'])} memory free, {host['system']}",
    ]
    for device in report["devices"]:
        memory = "the host's memory"
        if device["memory_bytes"] is not None:
            free = device["memory_bytes"] - (device["used_memory_bytes"] or 0)
            memory = f"{_gib(free)} of {_gib(device['memory_bytes'])} free"
        lines.append(
            f"{'device':<12} {device['platform']}:{device['id']} {device['kind']}, {memory}"
        )
    for op in ("attention", "matmul"):
        for name, choice in report[op].items():
            lines.append(f"{op:<12} {name}: {choice['chosen'] or 'none can run here'}")
            lines += [
                f"{'':<12}   {o} refused: {reason}" for o, reason in choice["refused"].items()
            ]
    lines += [
        f"{'cache':<12} {caches['directory']}",
        f"{'demo model':<12} {caches['demo_model'] or 'not here; fetched when first served'}",
    ]
    lines += [f"{name:<12} {report[name]}" for name in ("hint", "problem") if report[name]]
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
