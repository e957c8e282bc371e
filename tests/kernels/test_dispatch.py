"""Choosing implementations: used or refused by name, the first that can for "auto", explained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import (
    AUTO_ORDER,
    IMPLEMENTATIONS,
    AttentionCall,
    KVCacheLayout,
    PlanningImplementation,
    explain,
    plan_attention,
    ragged_paged_attention,
    unsupported_reason,
)
from pallas_kernels.ragged_paged_attention.layout import PLATFORMS, zeros
from pallas_kernels.ragged_paged_attention.specs import MODEL_SHAPES


@dataclasses.dataclass(frozen=True)
class Upto:
    """An implementation of nothing that serves calls up to a number."""

    limit: int

    def unsupported_reason(self, call: int) -> str | None:
        return None if call <= self.limit else f"{call} is above {self.limit}"


TABLE = {"slow": Upto(100), "fast": Upto(10), "faster": Upto(5)}
ORDER = ("faster", "fast", "slow")


@pytest.mark.parametrize(("call", "chosen"), [(5, "faster"), (6, "fast"), (11, "slow")])
def test_auto_takes_the_first_that_can(call, chosen):
    assert dispatch.choose(TABLE, ORDER, "auto", call) == chosen
    assert dispatch.explain(TABLE, ORDER, call).chosen == chosen


def test_auto_takes_none_outside_its_order():
    assert dispatch.choose(TABLE, ("slow",), "auto", 5) == "slow"


def test_auto_says_why_nothing_can():
    with pytest.raises(dispatch.UnsupportedError, match="101 is above 5") as raised:
        dispatch.choose(TABLE, ORDER, "auto", 101)
    assert "101 is above 10;" in str(raised.value)


def test_named_is_used_or_refused_never_swapped():
    assert dispatch.choose(TABLE, ORDER, "slow", 5) == "slow"
    with pytest.raises(dispatch.UnsupportedError, match="'faster' refused: 6 is above 5"):
        dispatch.choose(TABLE, ORDER, "faster", 6)
    with pytest.raises(dispatch.UnsupportedError, match="'fastest' refused: there is no such"):
        dispatch.choose(TABLE, ORDER, "fastest", 5)


def test_explanation_names_every_refusal():
    explanation = dispatch.explain(TABLE, ORDER, 7)
    assert explanation.refused == {"faster": "7 is above 5"}
    assert str(explanation) == "fast (faster refused: 7 is above 5)"
    assert str(dispatch.explain(TABLE, ORDER, 1)) == "faster"
    assert str(dispatch.explain(TABLE, ORDER, 101)).startswith("none (slow refused: 101")


def test_every_implementation_has_a_place_in_some_order():
    assert set(AUTO_ORDER) == set(PLATFORMS)
    assert {name for order in AUTO_ORDER.values() for name in order} == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_auto_serves_real_models_everywhere(chip, model):
    explanation = explain(MODEL_SHAPES[model].call(chip))
    assert explanation.chosen in AUTO_ORDER[chip.platform]


def test_xla_refuses_axis_orders_it_does_not_read():
    call = MODEL_SHAPES["SmolLM2-135M"].call(CHIPS["cpu"])
    call = dataclasses.replace(call, layout=dataclasses.replace(call.layout, axes="LKPSH"))
    reason = unsupported_reason("xla", call)
    assert reason is not None and "axes" in reason
    assert explain(call).refused["xla"] == reason
    assert "reference" not in explain(call).refused
    assert explain(call).chosen == "reference"


LAYOUT = KVCacheLayout.for_platform("cpu", 1, 2, 8, "bfloat16", 4)
CPU_CALL = AttentionCall(LAYOUT, CHIPS["cpu"], 4, LAYOUT.dtype)
CPU_IMPLEMENTATIONS = [n for n in IMPLEMENTATIONS if unsupported_reason(n, CPU_CALL) is None]


WHERE: dict[str, Any] = dict(
    block_tables=jnp.array([[1]], jnp.int32),
    kv_lens=jnp.array([4], jnp.int32),
    cu_q_lens=jnp.array([0, 4], jnp.int32),
    num_rows=1,
)


def _attend(**changes):
    new = jnp.ones((4, LAYOUT.num_kv_heads, LAYOUT.head_dim))
    arguments: dict[str, Any] = dict(
        q=jnp.ones((4, 4, 8)),
        k=new,
        v=new,
        kv_cache=zeros(LAYOUT, 3),
        layer=0,
        **WHERE,
        layout=LAYOUT,
        chip=CHIPS["cpu"],
        scale=1.0,
    )
    return ragged_paged_attention(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.ones((4, 3, 8))}, "3 query heads of 8 do not fit"),
        ({"kv_cache": zeros(LAYOUT, 3)._replace(v=jnp.zeros((1, 3, 2, 4, 8)))}, "V cache is float"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0"),
        ({"k_scale": 2.0}, "for quantized caches, not bfloat16"),
        ({"v_scale": 2.0}, "for quantized caches, not bfloat16"),
        ({"chip": CHIPS["h100"]}, "the layout is for a cpu, but h100 is none"),
        ({"implementation": "abacus"}, "'abacus' refused: there is no such implementation"),
    ],
)
def test_refuses_arguments_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        _attend(**changes)


@pytest.mark.parametrize("implementation", ["auto", *CPU_IMPLEMENTATIONS])
def test_uses_the_implementation_it_was_asked_for(implementation, monkeypatch):
    used = []
    for name, module in IMPLEMENTATIONS.items():
        original = module.ragged_paged_attention

        def spy(*args, name=name, original=original, **kwargs):
            used.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "ragged_paged_attention", spy)
    jax.eval_shape(lambda: _attend(implementation=implementation))
    assert used == ["xla" if implementation == "auto" else implementation]


def test_refused_by_name_is_not_swapped(monkeypatch):
    monkeypatch.setattr(IMPLEMENTATIONS["xla"], "unsupported_reason", lambda call: "not today")
    with pytest.raises(dispatch.UnsupportedError, match="'xla' refused: not today"):
        _attend(implementation="xla")
    jax.eval_shape(lambda: _attend(implementation="auto"))


def test_implementations_learn_all_they_may_refuse_a_call_for(monkeypatch):
    calls = []
    monkeypatch.setattr(IMPLEMENTATIONS["xla"], "unsupported_reason", calls.append)
    layout = dataclasses.replace(LAYOUT, dtype=jnp.dtype("int8"))
    quantized = dict(layout=layout, kv_cache=zeros(layout, 3), v_scale=0.5)
    options = dict(sliding_window=3, soft_cap=2.0, sinks=jnp.zeros(4))
    jax.eval_shape(_attend)
    jax.eval_shape(lambda: _attend(**quantized, **options))
    assert calls == [
        AttentionCall(LAYOUT, CHIPS["cpu"], 4, jnp.dtype("float32")),
        AttentionCall(
            *(layout, CHIPS["cpu"], 4, jnp.dtype("float32"), 3, 2.0),
            has_sinks=True,
            has_scales=True,
        ),
    ]


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_one_scale_is_the_same_as_one_for_each_head(implementation):
    layout = dataclasses.replace(LAYOUT, dtype=jnp.dtype("int8"))

    @jax.jit
    def out(scale):
        return _attend(
            layout=layout,
            kv_cache=zeros(layout, 3),
            v_scale=scale,
            implementation=implementation,
        )[0]

    np.testing.assert_array_equal(out(0.5), out(jnp.full(2, 0.5)))
    np.testing.assert_array_equal(out(0.5), out(jnp.float32(0.5)))
    assert not np.array_equal(out(0.4), out(0.5))


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_a_plan_is_used_and_changes_nothing(implementation, monkeypatch):
    expected = jax.jit(lambda: _attend(implementation=implementation))()
    call = dataclasses.replace(CPU_CALL, q_dtype=jnp.dtype("float32"))
    plan = plan_attention(call, 4, 3, **WHERE, implementation=implementation)
    module = IMPLEMENTATIONS[implementation]
    if isinstance(module, PlanningImplementation):
        monkeypatch.setattr(module, "plan", None)  # it is not asked again
    planned = jax.jit(lambda plan: _attend(implementation=implementation, plan=plan))(plan)
    for got, want in zip(jax.tree.leaves(planned), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 5},
        {"num_pages": 4},
        {"implementation": "reference"},
        {"call": dataclasses.replace(CPU_CALL, q_dtype=jnp.dtype("float32"), sliding_window=2)},
    ],
)
def test_refuses_the_plan_of_another_call(changes):
    call = dataclasses.replace(CPU_CALL, q_dtype=jnp.dtype("float32"))
    plan = plan_attention(**dict(call=call, num_tokens=4, num_pages=3, **WHERE) | changes)
    with pytest.raises(ValueError, match="the plan is for"):
        _attend(plan=plan)


def test_annotations_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="block_tables"):
        _attend(block_tables=jnp.array([[1]], jnp.float32))
