"""The comparison that judges implementations fails for every mistake it is there to find.

A right result is held against an expectation with one mistake in it, which is the same distance
as a wrong result has from the right expectation.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels import harness, oracle
from tests.kernels.cases import CONFIGS, Case, RowPlan, make_case

PLANS = [RowPlan(7, 13), RowPlan(1, 30), RowPlan(0, 5), RowPlan(3, 0), RowPlan(2, 15)]
SEED = 20


@pytest.fixture(params=["everything", "everything-fp8"], scope="module")
def right(request) -> tuple[Case, harness.Result]:
    """A case in which every feature matters, and its right result."""
    case = make_case(CONFIGS[request.param], PLANS, SEED)
    result = harness.run("reference", case)
    harness.check(case, case.expected(), result)
    return case, result


def _mask(is_visible: Callable[[int, int, int], bool]) -> dict[str, Callable[..., object]]:
    return {"is_visible": is_visible}


# One function of the oracle, broken.
BROKEN_RULES = {
    "sees one token ahead": _mask(lambda q, k, w: q - w < k <= q + 1),
    "does not see itself": _mask(lambda q, k, w: (q - w < k < q) or k == q == 0),
    "not causal": _mask(lambda q, k, w: k > q - w),
    "window ignored": _mask(lambda q, k, w: k <= q),
    "window one too long": _mask(lambda q, k, w: q - w <= k <= q),
    "window one too short": _mask(lambda q, k, w: q - w + 1 < k <= q),
    "KV heads interleaved": {"kv_head_of": lambda head, num_heads, num_kv_heads: head % 4},
    "context ignored": {"position_of": lambda token, row: token},
    "kv_len taken as before the step": {
        "position_of": lambda token, row: min(len(row.keys) + token, len(row.keys) - 1)
    },
    "soft cap ignored": {"cap": lambda scores, soft_cap: scores},
    "soft cap doubled": {"cap": lambda scores, c: 2 * c * np.tanh(scores / (2 * c))},
    "sinks ignored": {"denominator_of": lambda weights, sink_weight: weights.sum()},
    "sinks counted twice": {"denominator_of": lambda weights, sink: weights.sum() + 2 * sink},
}


@pytest.mark.parametrize("broken", BROKEN_RULES.values(), ids=BROKEN_RULES)
def test_finds_broken_rule(right, broken, monkeypatch):
    case, result = right
    for name, function in broken.items():
        monkeypatch.setattr(oracle, name, function)
    with pytest.raises(AssertionError, match="outputs are off"):
        harness.check(case, case.expected(), result)


def _with_row(case: Case, r: int, **changes: np.ndarray) -> Case:
    rows = list(case.rows)
    rows[r] = dataclasses.replace(rows[r], **changes)
    return dataclasses.replace(case, rows=rows)


def _with_options(case: Case, **changes: object) -> Case:
    return dataclasses.replace(case, options=dataclasses.replace(case.options, **changes))


def _scores_unscaled(case: Case) -> Case:
    return _with_options(case, scale=1.0)


def _sinks_of_other_heads(case: Case) -> Case:
    assert case.options.sinks is not None
    return _with_options(case, sinks=np.roll(case.options.sinks, 1))


def _k_scale_dropped(case: Case) -> Case:
    assert case.k_scale is not None
    return _with_row(case, 0, keys=case.rows[0].keys / case.k_scale[:, None])


def _v_scale_dropped(case: Case) -> Case:
    assert case.v_scale is not None
    return _with_row(case, 0, values=case.rows[0].values / case.v_scale[:, None])


def _scale_of_first_head_for_all(case: Case) -> Case:
    assert case.v_scale is not None
    ratio = case.v_scale[0] / case.v_scale
    return _with_row(case, 0, values=case.rows[0].values * ratio[:, None])


def _pages_swapped(case: Case) -> Case:
    size = case.config.page_size
    order = np.arange(len(case.rows[1].keys))
    order[size : 3 * size] = np.roll(order[size : 3 * size], size)
    return _with_row(case, 1, keys=case.rows[1].keys[order], values=case.rows[1].values[order])


def _page_of_another_row(case: Case) -> Case:
    size = case.config.page_size
    values = case.rows[1].values.copy()
    values[2 * size : 3 * size] = case.rows[0].values[size : 2 * size]
    return _with_row(case, 1, values=values)


def _stale_token(case: Case) -> Case:
    values = case.rows[1].values.copy()
    values[-1] = values[-2]
    return _with_row(case, 1, values=values)


def _tokens_of_next_row(case: Case) -> Case:
    return dataclasses.replace(case, rows=[*case.rows[1:], case.rows[0]])


BROKEN_CONTENTS = [
    _scores_unscaled,
    _sinks_of_other_heads,
    _k_scale_dropped,
    _v_scale_dropped,
    _scale_of_first_head_for_all,
    _pages_swapped,
    _page_of_another_row,
    _stale_token,
    _tokens_of_next_row,
]


@pytest.mark.parametrize("break_contents", BROKEN_CONTENTS)
def test_finds_wrong_contents(right, break_contents):
    case, result = right
    with pytest.raises(AssertionError, match="outputs are off"):
        harness.check(case, break_contents(case).expected(), result)


def _not_written(case: Case) -> dict[str, np.ndarray]:
    return {"k_after": case.k_before}


def _v_not_written(case: Case) -> dict[str, np.ndarray]:
    return {"v_after": case.v_before}


def _written_one_slot_late(case: Case) -> dict[str, np.ndarray]:
    return {"k_after": np.roll(case.k_after, 1, axis=2)}


def _written_to_other_layer(case: Case) -> dict[str, np.ndarray]:
    return {"k_after": case.k_after[::-1]}


def _k_and_v_swapped(case: Case) -> dict[str, np.ndarray]:
    return {"k_after": case.v_after, "v_after": case.k_after}


def _free_slot_touched(case: Case) -> dict[str, np.ndarray]:
    is_untouched = (case.v_after.view(np.uint8) == case.v_before.view(np.uint8)).all(axis=(3, 4))
    is_untouched[:, 0] = False
    place = tuple(np.argwhere(is_untouched)[-1])
    v_after = case.v_after.copy()
    v_after.view(np.uint8)[(*place, 0, 0)] ^= 1
    return {"v_after": v_after}


BROKEN_WRITES = [
    _not_written,
    _v_not_written,
    _written_one_slot_late,
    _written_to_other_layer,
    _k_and_v_swapped,
    _free_slot_touched,
]


@pytest.mark.parametrize("break_write", BROKEN_WRITES)
def test_finds_wrong_write(right, break_write):
    case, result = right
    broken = dataclasses.replace(case, **break_write(case))
    with pytest.raises(AssertionError, match="cache differs"):
        harness.check(broken, case.expected(), result)


def test_finds_wrong_output(right):
    case, result = right
    expected = case.expected()
    num_tokens = sum(plan.q_len for plan in PLANS)
    for token, value, message in (
        (0, np.nan, "outputs are off"),
        (num_tokens - 1, result.out[num_tokens - 1, 0, 0] + 0.1, "outputs are off"),
        (num_tokens, 1e-6, "padding tokens"),
        (-1, np.nan, "padding tokens"),
    ):
        out = result.out.copy()
        out[token, 0, 0] = value
        with pytest.raises(AssertionError, match=message):
            harness.check(case, expected, dataclasses.replace(result, out=out))
