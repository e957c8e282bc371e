"""Every implementation of ragged paged attention against the oracle."""

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS
from tests.kernels import harness
from tests.kernels.cases import CONFIGS, RowPlan, make_case, row_plans

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matches_oracle_on_any_ragged_mix(implementation, config):
    @hypothesis.settings(max_examples=12, deadline=None)
    @hypothesis.given(plans=row_plans(config), seed=st.integers(0, 2**32 - 1))
    @hypothesis.example(plans=[], seed=0)
    @hypothesis.example(plans=[RowPlan(0, 0), RowPlan(1, 0), RowPlan(0, 3)], seed=1)
    @hypothesis.example(plans=[RowPlan(1, i) for i in range(config.max_rows)], seed=2)
    @hypothesis.example(plans=[RowPlan(min(16, config.page_size * 4), 0)], seed=3)
    def check(plans, seed):
        case = make_case(config, plans, seed)
        harness.check(case, case.expected(), harness.run(implementation, case))

    check()
    assert harness.num_traces[implementation, config] == 1
