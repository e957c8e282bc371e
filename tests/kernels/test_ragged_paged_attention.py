"""Every implementation of ragged paged attention against the oracle."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.kernels import harness
from tests.kernels.cases import CONFIGS, RowPlan, edge_plans, make_case, row_plans

# (implementation, chip whose layout it reads).
SETUPS = {"reference": ("reference", "cpu"), "xla": ("xla", "cpu"), "xla-tpu": ("xla", "v6e")}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matches_oracle_on_any_ragged_mix(setup, config, subtests):
    implementation, chip = setup
    config = dataclasses.replace(config, chip=chip)

    def check(plans: list[RowPlan], seed: int) -> None:
        case = make_case(config, plans, seed)
        harness.check(case, case.expected(), harness.run(implementation, case))

    for seed, (name, plans) in enumerate(edge_plans(config).items()):
        with subtests.test(name):
            check(plans, seed)

    @hypothesis.settings(max_examples=10, deadline=None)
    @hypothesis.given(plans=row_plans(config), seed=st.integers(0, 2**32 - 1))
    def check_any(plans, seed):
        check(plans, seed)

    check_any()
    assert harness.num_traces[implementation, config] == 1
