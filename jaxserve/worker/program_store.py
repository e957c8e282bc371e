"""Compiled programs on disk, found again without being traced.

jax's own compilation cache is asked for a program that is traced and lowered already, which is most
of a warm start. A program of ours follows from the arguments of its job, so those name it here,
together with all else that could change it: sources, versions, devices and options.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pickle
import threading
from pathlib import Path

import jax
from jax.experimental import serialize_executable

import jaxserve
import pallas_kernels
from pallas_kernels.matmul.cpu import has_tiles

logger = logging.getLogger(__name__)

type Job = functools.partial[jax.stages.Compiled]

_DIGEST_BYTES = 32  # of SHA-256, before what it is of
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_from_jax_cache = threading.local()


def _on_event(event: str, **_: str | int) -> None:
    """jax calls this in the thread that compiles."""
    if event == _CACHE_HIT_EVENT:
        _from_jax_cache.is_hit = True


jax.monitoring.register_event_listener(_on_event)


class ProgramStore:
    """Programs under a directory; many threads and processes may use it at once.

    A file that cannot be read counts as none: the program is compiled again.
    num_loaded: programs that were found here so far.
    """

    def __init__(self, directory: Path, devices: list[jax.Device]):
        self._directory = directory
        self._devices = devices
        self._fingerprint = _fingerprint(devices)
        self._lock = threading.Lock()
        self.num_loaded = 0

    def load_or_run(self, job: Job) -> jax.stages.Compiled:
        """The program of `job`, which is run where this does not have it yet."""
        facts = f"{job.func.__qualname__} {job.args}"
        # A function of somebody else, such as a logits processor, has no name that tells it apart.
        # What several processes run together, jax's own cache keeps.
        if " at 0x" in facts or jax.process_count() > 1:
            return job()
        name = hashlib.sha256((self._fingerprint + facts).encode()).hexdigest()
        path = self._directory / f"{name}.program"
        program = self._load(path)
        if program is not None:
            with self._lock:
                self.num_loaded += 1
            return program
        _from_jax_cache.is_hit = False
        program = job()
        # What a CPU's compiler gave is whole only the first time: read back from a cache, it can be
        # run but not be written again.
        if not _from_jax_cache.is_hit:
            _write(path, program)
        return program

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        try:
            data = path.read_bytes()
            digest, parts = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if hashlib.sha256(parts).digest() != digest:  # damaged code would end the process
                raise ValueError("it is damaged")
            code, inputs, outputs = pickle.loads(parts)
            return serialize_executable.deserialize_and_load(
                code, inputs, outputs, self._devices[0].client, self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:
            logger.warning("%s is made again: %s: %s", path, type(error).__name__, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None


def _write(path: Path, program: jax.stages.Compiled) -> None:
    """Writes at once or not at all; a program that cannot be written will be compiled again."""
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        parts = pickle.dumps(serialize_executable.serialize(program))
        unfinished.write_bytes(hashlib.sha256(parts).digest() + parts)
        unfinished.replace(path)
    except Exception as error:
        logger.warning("%s cannot be kept: %s: %s", path, type(error).__name__, error)
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _fingerprint(devices: list[jax.Device]) -> str:
    """What changes programs beside the arguments of their jobs."""
    sources = hashlib.sha256()
    for package in (jaxserve, pallas_kernels):
        root = Path(package.__path__[0])
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".json", ".c", ".h")):
            sources.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
            sources.update(path.read_bytes())
    options = {k: v for k, v in jax.config.values.items() if k != "jax_compilation_cache_dir"}
    facts = {
        "sources": sources.hexdigest(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "platform": devices[0].client.platform_version,
        "processor": _processor(),
        "tiles": devices[0].platform == "cpu" and has_tiles(),
        "devices": [(device.id, device.device_kind) for device in devices],
        "all devices": len(devices[0].client.devices()),
        "options": options,
        "flags": [os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS")],
    }
    return json.dumps(facts, default=str, sort_keys=True)


def _processor() -> str:
    """What programs for a CPU are compiled for: its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
