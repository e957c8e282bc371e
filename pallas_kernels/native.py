"""Custom calls of XLA on CPUs, in C: compiled for this machine when first wanted, and kept.

The compiler is the machine's own, or that of the package ziglang, which `jaxserve[cpu]` brings.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

_SOURCES = tuple(sorted(Path(__file__).parent.rglob("*.c")))
_HEADERS = tuple(sorted(Path(__file__).parent.rglob("*.h")))
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
_COMPILE_S = 120


@functools.cache
def problem(target: str) -> str | None:
    """Makes the library, once, and registers its function `target` under that name.

    Returns what stands in the way, if something does.
    """
    try:
        function = getattr(library(), target)
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())
    has_tiles()  # asks the system for them: a program that is loaded may use them untraced
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; raises what `make_library` does."""
    return ctypes.CDLL(str(make_library()))


@functools.cache
def has_tiles() -> bool:
    """Whether the library multiplies by this CPU's unit for tiles (AMX)."""
    return bool(library().jaxserve_has_tiles())


def make_library() -> Path:
    """The compiled library of all sources, for this CPU and this jaxlib.

    Raises:
      OSError, SubprocessError: there is no C compiler, or it fails.
    """
    compiler = _compiler()
    texts = (path.read_text("utf-8") for path in (*_SOURCES, *_HEADERS))
    parts = (*texts, importlib.metadata.version("jaxlib"), cpu(), *compiler, *_FLAGS)
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    try:
        directory = Path.home() / ".cache" / "jaxserve" / "libraries"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # nobody's home, or not ours to write
        directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))
    path = directory / f"kernels-{digest}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / path.name
            include = (f"-I{jax.ffi.include_dir()}", f"-I{Path(__file__).parent}")
            command = [*compiler, *_FLAGS, *include, *map(str, _SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
            if done.returncode:
                raise OSError(f"{' '.join(compiler)} fails: {done.stderr[-500:]}")
            os.replace(made, path)
    return path


@functools.cache
def cpu() -> str:
    """What tells apart CPUs that one library is not good for."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return platform.machine() + "".join(sorted(kinds))


def _compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found, "-march=native"]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-mcpu=native"]
    raise OSError("there is no C compiler: cc, or the package ziglang of jaxserve[cpu]")
