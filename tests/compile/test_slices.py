"""Whole steps on slices of many chips and hosts: what crosses their links is what has to.

Bytes are those that each device sends if the devices stand in a ring (`hlo.ring_bytes`), of what a
program moves and of the least that it could. How a chip really passes them on is the business of
its runtime, and no matter for the ratio.
"""

import dataclasses

import pytest

from tests.compile import hlo
from tests.compile.compilers import Compiled, Compilers
from tests.compile.steps import GIB, MAX_TOKENS, MEMORY_BYTES, Step, check_sampling, compiled

_NUM_ROWS = 64
_NUM_CACHED = _NUM_ROWS * 4096
_MOST = 1.05  # times the least
_MIB = 2**20


def _step(chip: str, num_devices: int, model: str, num_hosts: int = 1) -> Step:
    return Step(*(chip, model, num_devices, _NUM_ROWS), num_cached=_NUM_CACHED, num_hosts=num_hosts)


_FAST = [_step("h100", 8, "Llama-3.3-70B")]
_TWO_HOSTS = _step("v5e", 16, "Qwen3-32B", num_hosts=2)
_DECODES = [
    *_FAST,
    _TWO_HOSTS,
    _step("v6e", 8, "Qwen3-32B"),
    _step("tpu7x", 8, "Llama-3.3-70B"),
    _step("h100", 4, "Qwen3-32B"),
    _step("b200", 8, "Llama-3.3-70B"),
    _step("h100", 16, "Llama-3.3-70B", num_hosts=2),
    _step("h100", 16, "Llama-3.1-405B", num_hosts=2),
    _step("h100", 8, "half of Llama-3.1-405B"),  # what each host of a pipeline of two would run
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_slice:
        forwards = _FAST
        if not metafunc.config.getoption("fast"):
            prefills = [dataclasses.replace(step, num_tokens=MAX_TOKENS) for step in _DECODES]
            forwards = _DECODES + prefills
        jobs = [(step, dataclasses.replace(step, samples=True)) for step in forwards]
        metafunc.parametrize("jobs", jobs, ids=[str(step) for step, _ in jobs])
    elif "jobs" in metafunc.fixturenames:
        jobs = (_TWO_HOSTS, dataclasses.replace(_TWO_HOSTS, num_hosts=4))
        metafunc.parametrize("jobs", [jobs], ids=["v5e"])


def test_slice(compilers: Compilers, table: list[str], jobs: tuple[Step, Step]) -> None:
    step, sampling = jobs
    forward, sampled = (compiled(compilers, job) for job in jobs)
    moved, sampling_moved = hlo.collectives(forward.hlo), hlo.collectives(sampled.hlo)
    _check_forward(step, moved)
    check_sampling(sampling, sampled)
    ratio = _check_ratio(step, moved + sampling_moved)
    used = _check_memory(step, forward, sampled)
    sent, small = (sum(x.link_bytes for x in each) for each in (moved, sampling_moved))
    table.append(
        f"{step}: {sum(x.times for x in moved)} all-reduces of {moved[0].shape}; "
        f"{sent / _MIB:.1f} MiB a device, {small / 2**10:.0f} KiB in "
        f"{sum(x.times for x in sampling_moved)} for sampling; {ratio:.4f} of the least; {used}"
    )


def test_hosts_run_one_program(compilers: Compilers, jobs: tuple[Step, ...]) -> None:
    """The same sixteen chips, on two hosts or on four: which host has a chip is in no program."""
    two, four = (compiled(compilers, job) for job in jobs)
    moved = hlo.collectives(two.hlo)
    _check_forward(jobs[0], moved)
    _check_ratio(jobs[0], moved)
    assert "num_partitions=16" in two.hlo
    assert two.hlo == four.hlo


def _check_forward(step: Step, moved: list[hlo.Collective]) -> None:
    """Two sums of hidden states a layer and one of the embedding, of bfloat16, and nothing else."""
    info = step.config.info
    hidden = [step.num_tokens, info.hidden_size]
    assert hidden not in step.large_dims, "a weight or a cache would look like hidden states"
    assert {(each.name, each.shape) for each in moved} == {
        ("all-reduce", f"bf16[{step.num_tokens},{info.hidden_size}]")
    }
    assert {each.num_devices for each in moved} == {step.num_devices}
    assert sorted(each.times for each in moved) == [1, info.num_layers, info.num_layers]


def _check_ratio(step: Step, moved: list[hlo.Collective]) -> float:
    """What a step moves over the least that it could.

    The least: two sums of hidden states a layer; for the embedding, of which each token's line is
    on one device, those lines to the others; for sampling, each device's best logit and its token.
    """
    info, num = step.config.info, step.num_devices
    hidden = 2 * step.num_tokens * info.hidden_size
    best = 8 * step.bucket.num_rows
    least = (
        2 * info.num_layers * hlo.ring_bytes("all-reduce", hidden, num)
        + hlo.ring_bytes("all-gather", hidden, num)
        + hlo.ring_bytes("all-gather", num * best, num)
    )
    ratio = sum(each.link_bytes for each in moved) / least
    assert 1 <= ratio <= _MOST, ratio
    return ratio


def _check_memory(step: Step, forward: Compiled, sampled: Compiled) -> str:
    """A device has its share of weights and cache, little beside, and memory for all of it."""
    shares = step.weight_bytes + step.cache_bytes
    assert 0 <= forward.argument_bytes - shares < 0.02 * shares, "not every device has a share"
    results = forward.output_bytes - forward.alias_bytes + sampled.output_bytes
    temp = max(forward.temp_bytes, sampled.temp_bytes)
    memory = MEMORY_BYTES[step.chip] * GIB
    assert forward.argument_bytes + 2 * results + temp < memory
    return (
        f"{step.weight_bytes / GIB:.1f} + {step.cache_bytes / GIB:.1f} + {temp / GIB:.2f} GiB "
        f"of {MEMORY_BYTES[step.chip]}"
    )


# --- each check catches what it is for -----------------------------------------------------------

_STEP = _step("h100", 8, "Llama-3.3-70B")


def _moved(dtype: str = "bf16", *more: hlo.Collective) -> list[hlo.Collective]:
    shape = f"{dtype}[{_NUM_ROWS},8192]"
    return [*(hlo.Collective("all-reduce", shape, 8, times, "") for times in (1, 80, 80)), *more]


def test_what_must_move_passes():
    _check_forward(_STEP, _moved())
    assert _check_ratio(_STEP, _moved()) < 1.004


@pytest.mark.parametrize(
    "more",
    [
        hlo.Collective("all-gather", "bf16[8192,28672]", 8, 80, ""),  # down
        hlo.Collective("all-gather", "bf16[128256,8192]", 8, 1, ""),  # the LM head
        hlo.Collective("all-gather", "bf16[4097,64,8,128]", 8, 80, ""),  # a layer's keys
        hlo.Collective("all-gather", "f32[64,128256]", 8, 1, ""),  # logits
        hlo.Collective("all-reduce", "bf16[64,8192]", 8, 8, ""),  # one sum more in ten layers
    ],
    ids=["weight", "head", "cache", "logits", "sum"],
)
def test_what_need_not_move_is_found(more):
    with pytest.raises(AssertionError):
        _check_forward(_STEP, _moved("bf16", more))
    with pytest.raises(AssertionError):
        _check_ratio(_STEP, _moved("bf16", more))


def test_sums_of_float32_are_found():
    for check in (_check_forward, _check_ratio):
        with pytest.raises(AssertionError):
            check(_STEP, _moved("f32"))
