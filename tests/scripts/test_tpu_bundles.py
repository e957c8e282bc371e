"""The counts of a schedule, against ones made by hand.

rows_of_pages_v6e.txt is libtpu's packed-bundles-post-ra.txt of this kernel, compiled for v6e with
bounds checks off; 128 x 128 is a page:

    def kernel(count_ref, lens_ref, a_ref, pages_ref, out_ref, buffer_ref, sem):
        out_ref[...] = jnp.zeros_like(out_ref)

        def row(r, _):
            def page(p, _):
                copy = pltpu.make_async_copy(pages_ref.at[r * 4 + p], buffer_ref, sem)
                copy.start()
                copy.wait()
                out_ref[...] += jnp.dot(a_ref[...], buffer_ref[...])  # 16 x 128, bfloat16

            @pl.when(lens_ref[r] > 2)
            def _():
                jax.lax.fori_loop(0, lens_ref[r], page, None)

        jax.lax.fori_loop(0, count_ref[0], row, None)
"""

import importlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DELAY_SLOTS = 4
PAGE_BYTES = 128 * 128 * 2
# The parts of the kernel, by the numbers of their bundles; a branch is in one with its delay slots.
PROLOGUE = range(0x0, 0x13)
ROW = range(0x13, 0x20)
LONG_ROW = range(0x20, 0x27)
PAGE = range(0x27, 0x116)
END_OF_ROW = range(0x116, 0x11E)
EPILOGUE = range(0x11E, 0x12D)


@pytest.fixture
def tpu_bundles(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent.parent / "scripts"))
    return importlib.import_module("tpu_bundles")


@pytest.fixture
def text() -> str:
    return (HERE / "rows_of_pages_v6e.txt").read_text(encoding="utf-8")


def executed(tpu_bundles, text, num_rows, lens):
    operands = {"s32[1]": [num_rows], "s32[8]": lens}
    bundles = tpu_bundles.parse(text, DELAY_SLOTS)
    return tpu_bundles.count(bundles, lambda index, shape: operands.get(shape))


@pytest.mark.parametrize(
    ("num_rows", "lens", "num_long", "num_pages"),
    [
        (0, [9] * 8, 0, 0),
        (2, [2, 1, 9, 9, 9, 9, 9, 9], 0, 0),
        (3, [1, 3, 4, 9, 9, 9, 9, 9], 2, 7),
        (8, [3] * 8, 8, 24),
    ],
)
def test_branches_are_followed(tpu_bundles, text, num_rows, lens, num_long, num_pages):
    execution = executed(tpu_bundles, text, num_rows, lens)
    times = {
        PROLOGUE: 1,
        ROW: num_rows,
        LONG_ROW: num_long,
        PAGE: num_pages,
        END_OF_ROW: num_rows,
        EPILOGUE: 1,
    }
    assert list(execution.runs) == [count for part, count in times.items() for _ in part]
    assert execution.cycles == sum(len(part) * count for part, count in times.items())
    assert execution.dmas["hbm", "vmem", PAGE_BYTES] == num_pages
    assert execution.products["bf16"] == num_pages


def test_bytes_are_those_of_every_dma(tpu_bundles, text):
    execution = executed(tpu_bundles, text, 2, [4] * 8)
    queries, output = 16 * 128 * 2, 16 * 128 * 4
    assert execution.bytes_moved("hbm", "vmem") == 8 * PAGE_BYTES + queries
    assert execution.bytes_moved("vmem", "hbm") == output


def test_the_inner_loop_is_found(tpu_bundles, text):
    [loop] = executed(tpu_bundles, text, 3, [1, 3, 4, 9, 9, 9, 9, 9]).product_loops()
    assert tuple(loop.loop) == (PAGE[0], PAGE[-1])
    assert (loop.turns, loop.cycles) == (7, 7 * len(PAGE))
    assert loop.products == {"bf16": 7}


def test_no_loop_that_is_not_entered(tpu_bundles, text):
    assert executed(tpu_bundles, text, 2, [0] * 8).product_loops() == []


def test_spills_are_counted_by_turn(tpu_bundles, text):
    at = text.index("vadd.f32 %v191_v12")
    line = text.rindex("{", 0, at) + 1
    spilling = (
        " %900 = vst [vmem:[#allocation20_spill] sm:$0xff] /*vst_source=*/%v83_v11  ;;"
        " %v901_v40 = vld [vmem:[#allocation20_spill] sm:$0xff]  ;;"
        " %v902_v41 = vld [vmem:[#allocation21_spill] sm:$0xff]  ;;"
    )
    changed = text[:line] + spilling + text[line:]
    [loop] = executed(tpu_bundles, changed, 1, [5] * 8).product_loops()
    assert (loop.fills, loop.spills) == (10, 5)


@pytest.mark.parametrize(
    ("op", "a", "b", "result"),
    [
        ("sadd.s32", 2**31 - 1, 1, -(2**31)),
        ("ssub.s32", 3, 5, -2),
        ("smul.u32", 2**16, 2**16, 0),
        ("sshll.u32", 3, 31, -(2**31)),
        ("sshrl.u32", -1, 28, 15),
        ("sshra.s32", -8, 2, -2),
        ("sand.u32", -1, 12, 12),
        ("smin.u32", -1, 7, 7),
        ("smax.s32", -1, 7, 7),
        ("scmp.lt.s32.totalorder", -1, 0, 1),
        ("scmp.lt.u32.totalorder", -1, 0, 0),
        ("scmp.ge.s32.totalorder", 4, 4, 1),
    ],
)
def test_scalars_are_computed_as_32_bits(tpu_bundles, op, a, b, result):
    text = (
        f" 0   :  {{ %s1_s1 = smov {a % 2**32}  ;;  %s2_s2 = smov {b % 2**32} }}\n"
        f" 0x1   :  {{ %s3_s3 = {op} %s1_s1, %s2_s2 }}\n"
        f" 0x2   :  {{ %p4_p0 = scmp.eq.s32.totalorder %s3_s3, {result % 2**32} }}\n"
        " 0x3   :  { %5 = sbr.rel (!%p4_p0) target bundleno = 5 (0x5), region = 1 }\n"
        " 0x4   :  { %6 = dma.hbm_to_vmem /*hbm=*/%s1_s1, /*size_in_granules=*/1, /*vmem=*/%s2 }\n"
        " 0x5   :  {}\n"
    )
    execution = tpu_bundles.count(tpu_bundles.parse(text, 0), lambda index, shape: None)
    assert execution.bytes_moved("hbm", "vmem") == tpu_bundles.GRANULE_BYTES
