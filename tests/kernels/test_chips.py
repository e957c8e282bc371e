"""Chips are known by what JAX calls them."""

import pytest

from pallas_kernels.chips import CHIPS, chip_of


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5e", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v5p", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("tpu", "TPU7x", "tpu7x"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA L4", "l4"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA B200", "b200"),
    ],
)
def test_jax_kinds_name_chips(platform, kind, name):
    assert chip_of(platform, kind) is CHIPS[name]


def test_a_gpu_that_is_not_listed_is_like_the_one_of_its_capability():
    chip = chip_of("gpu", "NVIDIA GH200 480GB", "9.0")
    assert (chip.name, chip.capability) == ("NVIDIA GH200 480GB", (9, 0))
    assert chip.num_cores == CHIPS["h100"].num_cores


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "like", "found"),
    [
        ("tpu", "TPU v4", "", "v5e", (0, 0)),
        ("gpu", "NVIDIA L40", "8.9", "l4", (8, 9)),
        ("gpu", "NVIDIA RTX A6000", "8.6", "l4", (8, 6)),
        ("gpu", "AMD Instinct MI300X", "gfx942", "l4", (0, 0)),
    ],
)
def test_an_unknown_chip_keeps_its_name(platform, kind, capability, like, found):
    chip = chip_of(platform, kind, capability)
    assert (chip.name, chip.platform, chip.capability) == (kind, platform, found)
    assert chip.hbm_bytes_per_s == CHIPS[like].hbm_bytes_per_s


def test_names_are_the_keys():
    assert all(chip.name == name for name, chip in CHIPS.items())
