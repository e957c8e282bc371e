"""The op for a few tokens on a CPU, in C: it reads bfloat16 weights as fast as memory gives them.

XLA's products of few tokens are slower than that. The C compiler of this machine makes the library
when it is first wanted; where there is none, XLA's products serve.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.matmul.specs import MatmulCall

_MAX_TOKENS = 32  # XLA's products of more tokens are as fast
_MAX_TOKENS_WITH_BFLOAT16 = 16  # where the CPU multiplies bfloat16, which XLA makes use of
_TARGET = "jaxserve_matmul"
_SOURCE = Path(__file__).with_name("cpu.c")
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
_COMPILE_S = 120


def unsupported_reason(call: MatmulCall) -> str | None:
    """Serves products of few tokens with whole matrices of bfloat16, where it can be compiled."""
    if call.chip.platform != "cpu":
        return "runs on CPUs"
    if call.num_devices > 1:
        return "does not cut arrays over devices"
    if call.weight_dtype != jnp.bfloat16:
        return f"multiplies with weights of bfloat16, not {call.weight_dtype.name}"
    if call.shape[0] > (most := max_tokens()):
        return f"is for up to {most} tokens"
    return _problem()


def matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "L F D"],
    layer: int | Int32[Array, ""],
    num_tokens: int | Int32[Array, ""],
) -> Float32[Array, "M F"]:
    """See `pallas_kernels.matmul.matmul`; rows past num_tokens are zeros."""
    where = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(num_tokens, jnp.int32)])
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, out)(x.astype(jnp.float32), weights, where)


@functools.cache
def max_tokens() -> int:
    """Most tokens whose products are faster than XLA's on this CPU."""
    has_bfloat16 = re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", _cpu()) is not None
    return _MAX_TOKENS_WITH_BFLOAT16 if has_bfloat16 else _MAX_TOKENS


@functools.cache
def _problem() -> str | None:
    """Makes and registers the library; what stands in the way, if something does."""
    try:
        library = ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())
    target = jax.ffi.pycapsule(library.jaxserve_matmul)
    jax.ffi.register_ffi_target(_TARGET, target, platform="cpu")
    return None


def _library() -> Path:
    """The compiled library for this CPU and this jaxlib, which is kept.

    Raises:
      OSError, SubprocessError: there is no C compiler, or it fails.
    """
    compiler = _compiler()
    parts = (_SOURCE.read_text("utf-8"), importlib.metadata.version("jaxlib"), _cpu(), *compiler)
    name = f"matmul-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    directory = Path.home() / ".cache" / "jaxserve" / "libraries"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))
    path = directory / name
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / name
            command = [
                *compiler,
                *_FLAGS,
                f"-I{jax.ffi.include_dir()}",
                str(_SOURCE),
                "-o",
                str(made),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
            if done.returncode:
                raise OSError(f"{' '.join(compiler)} fails: {done.stderr[-500:]}")
            os.replace(made, path)
    return path


def _compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found, "-march=native"]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-mcpu=native"]
    raise OSError("there is no C compiler: cc, or the package ziglang of jaxserve[cpu]")


def _cpu() -> str:
    """What tells apart CPUs that a library is not good for both of."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return platform.machine() + "".join(sorted(kinds))
