"""Whether kernels in C can be tested here."""

import pytest

from pallas_kernels import native
from pallas_kernels.matmul import cpu

HAS_COMPILER = native.problem(cpu._TARGET) is None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
HAS_TILES = HAS_COMPILER and native.has_tiles()
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="the CPU has no unit for tiles (AMX)")
IN_C = "cpu" if HAS_COMPILER else "xla"  # what "auto" chooses on a CPU
