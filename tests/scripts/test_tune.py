"""The tuner: what it tries, how it ranks, what it writes; its clock runs, on a CPU."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from pallas_kernels import tuning
from pallas_kernels.chips import CHIPS

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("tune")


@pytest.fixture
def case(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("tpu_programs").Case(4, 2, 3, 1, 40, head_dim=8, page_size=16)


def test_the_cheapest_is_first_and_the_impossible_is_left_out(tune):
    costs = {1: (2.0, 5), 2: (1.0, 9), 3: None, 4: (1.0, 7)}

    def evaluate(sizes):
        cost = costs[sizes["pages"]]
        return None if cost is None else tune.Ranked(sizes, cost, {"cycles": cost[1]})

    lines = []
    ranked = tune.rank([{"pages": pages} for pages in costs], evaluate, lines.append)
    assert [found.sizes["pages"] for found in ranked] == [4, 2, 1]
    assert len(lines) == 4 and "does not compile" in lines[2]


def test_what_is_written_is_what_kernels_find(tune, case, tmp_path):
    chip = CHIPS["v6e"]
    call = tune.attention_call(chip, case)
    path = tmp_path / "tuned" / "v6e.json"
    for kernel, pages in (("tpu_decode", 2), ("tpu_prefill", 3), ("tpu_decode", 4)):
        best = tune.Ranked({"pages_per_block": pages}, (1.0,), {"cycles": 9})
        tune.write(path, "a rule", {(kernel, call): best})
    entries = json.loads(path.read_text())["entries"]
    assert [(entry["kernel"], entry["ranked_by"]) for entry in entries] == [
        ("tpu_decode", "a rule"),
        ("tpu_prefill", "a rule"),
    ]
    found = tuning.tuned_sizes(tmp_path, "tpu_decode", chip, call.tuning_shape)
    assert found == {"pages_per_block": 4}


@pytest.mark.parametrize("kernel", ["tpu_decode", "tpu_prefill"])
def test_candidates_are_sizes_that_the_kernels_take(tune, kernel):
    from pallas_kernels.ragged_paged_attention import tpu_decode, tpu_prefill

    takes = {"tpu_decode": tpu_decode.BlockSizes, "tpu_prefill": tpu_prefill.PrefillSizes}[kernel]
    for name, case in tune.CASES.items():
        if tune.kernel_of(case, "tpu") == kernel:
            tried = tune.candidates(kernel, case)
            assert len(tried) > 1, name
            for sizes in tried:
                takes(**sizes)


@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_candidates_of_gpu_decode_fit_and_differ(tune, chip):
    from pallas_kernels.ragged_paged_attention import gpu_decode

    call = tune.attention_call(CHIPS[chip], tune.CASES["Llama-3-8B, decode"])
    found = []
    for sizes in tune.gpu_candidates(CHIPS[chip], tune.CASES["Llama-3-8B, decode"]):
        with tuning.forced_sizes({"gpu_decode": sizes}):
            found.append(gpu_decode.block_sizes(call))
        assert sizes.items() <= dataclasses.asdict(found[-1]).items()
    assert gpu_decode.block_sizes(call) in found
    assert len(found) > 5 and len(set(found)) == len(found)


def test_ragged_rows_have_every_length_up_to_the_cases(tune, case):
    lens = tune.ragged_lens(case)
    assert lens == [13, 26, 40]


def test_it_measures(tune, case):
    assert 0 < tune.measure(CHIPS["cpu"], case) < 10


@pytest.mark.parametrize("path", sorted(SCRIPTS.parent.glob("pallas_kernels/*/tuned/*.json")))
def test_committed_sizes_are_for_chips_that_exist(path):
    assert path.stem in CHIPS
    for entry in tuning.load(path.parent.parent, path.stem):
        assert all(size > 0 for size in entry.sizes.values())
