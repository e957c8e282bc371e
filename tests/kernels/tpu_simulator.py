"""JAX's simulator of TPUs, made to fail on a data race in both versions of JAX."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, race_detection_state
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import tpu_decode, tpu_prefill
from pallas_kernels.ragged_paged_attention.tpu_common import LANES


@contextlib.contextmanager
def simulate() -> Iterator[None]:
    """Kernels traced in this context run in the simulator; what they call must end in it, too.

    DMAs happen as late as they may, memory that nothing has written is NaN, and reads out of bounds
    are errors. Blocks are as small as can be, so that short contexts take several.
    """
    races: list[Any] = []  # of each kernel that has run
    make = race_detection_state.RaceDetectionState

    def recorded(*args: Any, **kwargs: Any) -> Any:
        races.append(make(*args, **kwargs))
        return races[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)),
    ):
        patch.setattr(interpret_pallas_call, "RaceDetectionState", recorded)
        patch.setattr(tpu_decode, "_BLOCK_S", 0)
        patch.setattr(tpu_prefill, "_MAX_QUERIES", 16)
        patch.setattr(tpu_prefill, "_MAX_KEYS", LANES)
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()
    assert races, "nothing was simulated"
    assert not any(state.races_found for state in races), "a data race"  # newer versions raise it
