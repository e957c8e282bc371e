"""JAX's simulator of TPUs, made to find every race that vector clocks can show.

A DMA happens when it is started, and counts as done for those who waited for it only. So an access
of what it reads or writes that no wait puts an order to is a race, whatever the numbers are.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, shared_memory
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import tpu_decode, tpu_prefill
from pallas_kernels.ragged_paged_attention.tpu_common import LANES

# By default all DMAs share one clock, so that a wait for one puts an order to all before it. More
# than are ever on their way at once.
_NUM_CLOCKS = 256
_PARAMS = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="eager", vector_clock_size=1 + _NUM_CLOCKS
)


@contextlib.contextmanager
def simulate() -> Iterator[None]:
    """Kernels traced in this context run in the simulator, which fails on a data race.

    Memory that nothing has written is NaN. Reads out of bounds, waits for what nothing brings, and
    DMAs that nobody awaits are errors, too. Blocks are as small as can be, so that short
    contexts take several.
    """
    clocks = itertools.cycle(range(1, 1 + _NUM_CLOCKS))
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode(_PARAMS):
        simulated = raise_races(patch, interpret_pallas_call, "RaceDetectionState")
        memory = shared_memory.SharedMemory
        patch.setattr(memory, "get_random_virtual_device_id", lambda _: next(clocks))
        patch.setattr(memory, "get_sempahores_with_nonzero_count", _leftovers)
        patch.setattr(shared_memory.Semaphore, "signal", _signal)
        patch.setattr(shared_memory.Semaphore, "wait", _wait)
        patch.setattr(tpu_decode, "_BLOCK_S", 0)
        patch.setattr(tpu_prefill, "_MAX_QUERIES", 16)
        patch.setattr(tpu_prefill, "_MAX_KEYS", LANES)
        try:
            yield
            jax.effects_barrier()
        finally:
            pltpu.reset_tpu_interpret_mode_state()
    assert simulated, "no kernel has run"


def raise_races(patch: pytest.MonkeyPatch, module: Any, class_name: str) -> list[Any]:
    """Makes a simulator raise the races that its class finds; older versions only print them.

    Returns a list that gets an object of the class for each kernel that runs.
    """
    made: list[Any] = []

    class Raising(getattr(module, class_name)):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

        def __setattr__(self, name: str, value: Any) -> None:
            assert not (name == "races_found" and value), "RACE DETECTED"
            super().__setattr__(name, value)

    patch.setattr(module, class_name, Raising)
    return made


_find_leftovers = shared_memory.SharedMemory.get_sempahores_with_nonzero_count
_signal_known = shared_memory.Semaphore.signal
_wait_known = shared_memory.Semaphore.wait


def _leftovers(self: Any, device_id: int) -> list[Any]:
    found = _find_leftovers(self, device_id)
    assert not found, f"RACE DETECTED: nobody awaits DMAs of semaphores {[s.id for s, _ in found]}"
    return found


def _signals(semaphore: Any, core: int) -> list[tuple[int, Any]]:
    """Size and clock of each signal since the semaphore was last at zero."""
    by_core = vars(semaphore).setdefault("signals", collections.defaultdict(list))
    return by_core[core]


def _signal(
    self: Any, inc: Any, global_core_id: Any, clock: Any, *args: Any, **kwargs: Any
) -> None:
    _signals(self, int(global_core_id)).append((int(inc), clock.copy()))
    _signal_known(self, inc, global_core_id, clock, *args, **kwargs)


def _wait(self: Any, value: Any, global_core_id: Any, **kwargs: Any) -> None:
    """A wait ends after those signals only without which it would not: a DMA may overtake others.

    JAX has it end after all signals there ever were.
    """
    core = int(global_core_id)
    signals, left = _signals(self, core), int(self.count_by_core[core] - value)
    assert left >= 0, f"semaphore {self.id} is {-left} short of what is waited for"
    clock = shared_memory.SharedMemory.VectorClock(self.shared_memory.vector_clock_size)
    for size, other in signals:
        if size > left:
            clock.update(other)
    if left == 0:
        signals.clear()
    self.clocks[core] = clock
    _wait_known(self, value, global_core_id, **kwargs)
