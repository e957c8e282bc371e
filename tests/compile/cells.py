"""The compile matrix: which calls of ragged paged attention are compiled for which chips."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import COMPILED_CHIPS
from pallas_kernels.ragged_paged_attention import (
    AttentionCall,
    KVCache,
    KVCacheLayout,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.layout import QUANTIZED_DTYPES
from pallas_kernels.ragged_paged_attention.specs import MODEL_SHAPES
from tests.compile.compilers import Program

# So large that a copy of one layer's K, a quarter of it, cannot hide in what else a step takes.
_CACHE_BYTES = 6 * 2**30
_NUM_LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call for one chip, in a step of two layers as models make it.

    dtypes: of the activations and of the cache; one below 16 bits has scales.
    heads: KV heads, and query heads of each.
    size: tokens of the step, its rows.
    """

    chip: str
    head_dim: int = 128
    heads: tuple[int, int] = (8, 4)
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16")
    page_size: int = 128
    size: tuple[int, int] = (256, 256)
    max_context: int = 131_072
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    cache_share: float = 1.0

    def __str__(self) -> str:
        kv_heads, group = self.heads
        names = (
            self.chip,
            f"h{self.head_dim}",
            f"kv{kv_heads}x{group}",
            self.dtypes[1],
            f"page{self.page_size}",
            f"{self.size[0]}tokens{self.size[1]}rows",
            f"{self.max_context}context",
            "window" * (self.sliding_window is not None),
            "cap" * (self.soft_cap is not None),
            "sinks" * self.has_sinks,
        )
        return "-".join(name for name in names if name)

    @property
    def call(self) -> AttentionCall:
        """What the dispatcher is asked."""
        return AttentionCall(
            self._layout,
            COMPILED_CHIPS[self.chip],
            math.prod(self.heads),
            jnp.dtype(self.dtypes[0]),
            self.sliding_window,
            self.soft_cap,
            self.has_sinks,
            has_scales=self._layout.dtype in QUANTIZED_DTYPES,
        )

    @property
    def cache(self) -> KVCache:
        """The shapes of the cache."""
        layout = self._layout
        # A prime-like number of pages, so that no other array of the step has the size by chance.
        return layout.shape(int(_CACHE_BYTES * self.cache_share) // layout.bytes_per_page | 1)

    @functools.cached_property
    def _layout(self) -> KVCacheLayout:
        return KVCacheLayout.for_platform(
            COMPILED_CHIPS[self.chip].platform,
            _NUM_LAYERS,
            self.heads[0],
            self.head_dim,
            self.dtypes[1],
            self.page_size,
        )

    def program(self) -> Program:
        """The step, its cache donated."""
        call, (num_tokens, num_rows) = self.call, self.size
        layout, num_kv_heads = call.layout, call.layout.num_kv_heads

        def step(kv_cache: KVCache, q: Any, scales: Any, sinks: Any, *arrays: Any) -> Any:
            def one_layer(carry: Any, layer: Any) -> Any:
                out, kv_cache = carry
                return ragged_paged_attention(
                    *(out, *arrays[:2], kv_cache, layer, *arrays[2:]),
                    layout=layout,
                    chip=call.chip,
                    scale=layout.head_dim**-0.5,
                    sliding_window=call.sliding_window,
                    soft_cap=call.soft_cap,
                    sinks=sinks,
                    k_scale=scales,
                    v_scale=scales,
                ), None

            layers = jnp.arange(_NUM_LAYERS, dtype=jnp.int32)
            return jax.lax.scan(one_layer, (q, kv_cache), layers)[0]

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        new = array(num_tokens, num_kv_heads, layout.head_dim, dtype=call.q_dtype)
        args = (
            self.cache,
            array(num_tokens, call.num_heads, layout.head_dim, dtype=call.q_dtype),
            array(num_kv_heads, dtype=jnp.float32) if call.has_scales else None,
            array(call.num_heads, dtype=jnp.float32) if call.has_sinks else None,
            *(new, new, array(num_rows, self.max_context // self.page_size)),
            *(array(num_rows), array(num_rows + 1), array()),
        )
        return Program(jax.jit(step, donate_argnums=0), args)


# The first of a platform gets most of the fast subset, and of the pairs.
CHIPS_WITH_KERNELS = ("v6e", "h100", "v5e", "v5p", "tpu7x")
LEVELS: Mapping[str, Sequence[Any]] = {
    "chip": (*CHIPS_WITH_KERNELS, *(c for c in COMPILED_CHIPS if c not in CHIPS_WITH_KERNELS)),
    # Groups of 1, 3, 4, 8 and 16; the last two are MQA.
    "heads": ((8, 4), (8, 1), (3, 3), (8, 8), (2, 16), (1, 8), (1, 16)),
    "head_dim": (128, 64, 80, 96, 256),
    "dtypes": (
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("bfloat16", "int8"),
        ("bfloat16", "float8_e4m3fn"),
        ("bfloat16", "float8_e5m2"),
    ),
    "page_size": (128, 16, 32, 64, 256),
    "size": ((256, 256), (16, 16), (1024, 64), (8192, 256)),
    "max_context": (131_072, 4096),
    "sliding_window": (None, 1000),
    "soft_cap": (None, 30.0),
    "has_sinks": (False, True),
}


def each_once() -> list[Cell]:
    """The fast subset: every level of every feature on one chip of each platform, and a cell of
    each other chip."""
    chips = LEVELS["chip"]
    features = [name for name in LEVELS if name != "chip"]
    num_each = max(len(LEVELS[name]) for name in features)

    def cell(chip: str, number: int) -> Cell:
        levels = {}
        for place, name in enumerate(features):
            # Those of two levels in rhythms of their own.
            turn = number // (place % 3 + 1) if len(LEVELS[name]) == 2 else number
            levels[name] = LEVELS[name][turn % len(LEVELS[name])]
        return Cell(chip, **levels)

    cells = [cell(chip, number) for chip in chips[:2] for number in range(num_each)]
    others = enumerate(chips[2:], start=4)  # of the GPUs, none has the float32 that goes to XLA
    return cells + [cell(chip, number) for number, chip in others]


def pairwise() -> list[Cell]:
    """Few cells in which each level of a feature meets each level of every other feature.

    But not every chip: dtypes meet each chip that has kernels of its own, every other feature meets
    the kernels of both platforms, and a chip is there at least once. Greedy: a cell begins with a
    pair that no cell has yet, and takes of every further feature the level that adds most pairs.
    """
    met: set[frozenset[tuple[str, object]]] = set()
    cells = [_complete({"chip": i}, met) for i in range(len(LEVELS["chip"]))]
    for a, b in itertools.combinations(LEVELS, 2):
        for i, j in itertools.product(range(len(LEVELS[a])), range(len(LEVELS[b]))):
            choice = {a: i, b: j}
            if not _pairs(choice) <= met:
                cells.append(_complete(choice, met))
    return cells


def _complete(choice: dict[str, int], met: set[frozenset[tuple[str, object]]]) -> Cell:
    """A cell with these levels; adds its pairs to those that are met."""
    for name, levels in LEVELS.items():
        if name not in choice:
            num_new = [len(_pairs(choice | {name: i}) - met) for i in range(len(levels))]
            choice[name] = num_new.index(max(num_new))
    met |= _pairs(choice)
    return Cell(**{name: LEVELS[name][i] for name, i in choice.items()})


def one_by_one() -> list[Cell]:
    """Every level of every feature alone, and the heads of real models, on every chip."""
    changes: list[dict[str, Any]] = [
        {name: level} for name, levels in LEVELS.items() if name != "chip" for level in levels
    ]
    for model in MODEL_SHAPES.values():
        heads = (model.num_kv_heads, model.num_heads // model.num_kv_heads)
        changes.append({"heads": heads, "head_dim": model.head_dim})
    cells = (Cell(chip, **change) for chip in COMPILED_CHIPS for change in changes)
    return list(dict.fromkeys(cells))


def _pairs(choice: Mapping[str, int]) -> set[frozenset[tuple[str, object]]]:
    """The pairs of levels in a choice, which may not have all features."""
    pairs = set()
    for a, b in itertools.combinations(choice, 2):
        levels: dict[str, object] = {a: choice[a], b: choice[b]}
        if "chip" in levels:
            name = LEVELS["chip"][choice["chip"]]
            if name not in CHIPS_WITH_KERNELS:
                continue
            levels["chip"] = name if "dtypes" in levels else COMPILED_CHIPS[name].platform
        pairs.add(frozenset(levels.items()))
    return pairs
