"""Tuned sizes: those of the nearest entry by the stated rule, else none."""

import json

import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.tuning import Shape, forced_sizes, tuned_sizes

CHIP = CHIPS["v6e"]


def shape(dtype="bfloat16", page_size=128, num_heads=32, **more):
    return Shape({"dtype": dtype, "page_size": page_size}, {"num_heads": num_heads, **more})


@pytest.fixture
def op(tmp_path):
    """An op with a file for one chip."""
    entries = [
        ("decode", shape(num_heads=8), {"pages": 8}),
        ("decode", shape(num_heads=32), {"pages": 32}),
        ("decode", shape(num_heads=40), {"pages": 40}),
        ("decode", shape(page_size=64), {"pages": 64}),
        ("prefill", shape(num_heads=32), {"tile": 1}),
    ]
    (tmp_path / "tuned").mkdir()
    text = json.dumps(
        {
            "entries": [
                {"kernel": kernel, "shape": found._asdict(), "sizes": sizes}
                for kernel, found, sizes in entries
            ]
        }
    )
    (tmp_path / "tuned" / "v6e.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("kernel", "wanted", "sizes"),
    [
        ("decode", shape(), {"pages": 32}),
        ("decode", shape(num_heads=35), {"pages": 32}),
        ("decode", shape(num_heads=37), {"pages": 40}),
        ("decode", shape(num_heads=80), {"pages": 40}),  # a factor of two
        ("decode", shape(num_heads=81), None),
        ("decode", shape(num_heads=4), {"pages": 8}),
        ("decode", shape(num_heads=3), None),
        ("decode", shape(page_size=64), {"pages": 64}),
        ("decode", shape(page_size=32), None),
        ("decode", shape("float32"), None),
        ("decode", shape(more=1), None),
        ("prefill", shape(), {"tile": 1}),
        ("merge", shape(), None),
    ],
)
def test_the_nearest_entry_of_the_kernel(op, kernel, wanted, sizes):
    assert tuned_sizes(op, kernel, CHIP, wanted) == sizes


def test_none_for_a_chip_without_a_file(op):
    assert tuned_sizes(op, "decode", CHIPS["v5e"], shape()) is None


def test_forced_sizes_come_before_all_entries_and_go_away(op):
    with forced_sizes({"decode": {"pages": 1}}):
        assert tuned_sizes(op, "decode", CHIP, shape()) == {"pages": 1}
        assert tuned_sizes(op, "decode", CHIP, shape("float32")) == {"pages": 1}
        assert tuned_sizes(op, "prefill", CHIP, shape()) == {"tile": 1}
    assert tuned_sizes(op, "decode", CHIP, shape()) == {"pages": 32}
