"""The longest context that is promised, 131,072 tokens, by the decode kernels in the simulators.

Here, beside what is compiled, as it takes as long.
"""

import dataclasses

import pytest

from pallas_kernels.chips import CHIPS
from tests.kernels import harness
from tests.kernels.cases import Config, RowPlan, make_case

_LONGEST = 131_072


@pytest.mark.takes_minutes
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_decodes_the_longest_context(chip):
    config = Config(*(4, 1, 64, 256, "bfloat16", "bfloat16"), max_tokens=3, max_rows=2, chip=chip)
    config = dataclasses.replace(config, pages_per_row=_LONGEST // 256, num_layers=1)
    case = make_case(config, [RowPlan(1, _LONGEST - 1), RowPlan(1, 700)], seed=1)
    # Few keys have most of the weight, so that the sum is not lost in what its rounding may be.
    case = dataclasses.replace(case, options=dataclasses.replace(case.options, scale=0.75))
    harness.check(case, case.expected(), harness.run(CHIPS[chip].platform, case))
