"""The TPU's kernels, simulated with race detection: rows of several tiles, large and small ones."""

import pytest

from pallas_kernels.ragged_paged_attention import tpu_prefill, tpu_prefill_tile
from pallas_kernels.tuning import forced_sizes
from tests.kernels import harness
from tests.kernels.cases import Config, RowPlan, make_case

_SIZES = {
    "tpu_prefill": {"num_queries": 32, "num_keys": 256},
    "tpu_prefill_few": {"num_queries": 16, "num_keys": 128},
}
_MOST = 32  # new tokens of rows that are taken in small tiles

# Longer rows than those of the common suite: several tiles of queries, several blocks of keys. On
# tpu7x something is done that is done nowhere else.
CONFIGS = {
    "gqa4": Config(
        8, 2, 128, 16, "bfloat16", "bfloat16", max_tokens=80, pages_per_row=20, chip="v6e"
    ),
    "window": Config(
        4, 1, 64, 16, sliding_window=100, max_tokens=80, pages_per_row=20, chip="tpu7x"
    ),
}


def _plans(config: Config) -> dict[str, list[RowPlan]]:
    capacity = config.pages_per_row * config.page_size
    longest = min(config.max_tokens, capacity)
    return {
        "no rows": [],
        "from the start, rows of none, all tokens": [
            RowPlan(0, 3),
            RowPlan(longest - 6, 0),
            RowPlan(1, 150),
            RowPlan(0, 0),
            RowPlan(5, capacity // 2 - 3),
        ],
        "as many tokens as small tiles take, one more": [
            RowPlan(_MOST, capacity // 2 - _MOST),
            RowPlan(_MOST + 1, 90),
            RowPlan(2, 0),
        ],
        "to the end": [RowPlan(2, 1), RowPlan(longest - 7, capacity - longest + 7)],
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matches_oracle(config, subtests, monkeypatch):
    monkeypatch.setattr(tpu_prefill_tile, "_EDGE_KEYS", 128)  # a block is two parts
    monkeypatch.setattr(tpu_prefill, "_FEW_SHARE", 1)
    for seed, (name, plans) in enumerate(_plans(config).items()):
        with subtests.test(name), forced_sizes(_SIZES):
            case = make_case(config, plans, seed)
            harness.check(case, case.expected(), harness.run("tpu", case))
