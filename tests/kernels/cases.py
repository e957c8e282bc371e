"""Builds calls of ragged paged attention: ragged rows placed in pages, everything else poisoned."""

import dataclasses

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import KVCacheLayout
from tests.kernels import oracle


@dataclasses.dataclass(frozen=True)
class Config:
    """The static side of a call: one compiled program an implementation."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_scales: bool = False
    max_tokens: int = 24
    max_rows: int = 5
    pages_per_row: int = 4
    num_layers: int = 2
    chip: str = "cpu"
    axes: str | None = None  # where not the platform's

    @property
    def num_pages(self) -> int:
        """The null page, a table's worth for each row, and three that stay free."""
        return 1 + self.max_rows * self.pages_per_row + 3

    @property
    def layout(self) -> KVCacheLayout:
        layout = KVCacheLayout.for_platform(
            CHIPS[self.chip].platform,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.kv_dtype,
            self.page_size,
        )
        if self.axes is None:
            return layout
        return dataclasses.replace(layout, axes=self.axes)

    @property
    def unit_roundoff(self) -> float:
        return float(jnp.finfo(self.q_dtype).eps) / 2


# Every head dim and dtype, pages of 1 to 192, groups of 1 to 16, features alone and together.
CONFIGS = {
    "mha": Config(4, 4, 64, 4),
    "gqa3-bf16": Config(9, 3, 64, 16, "bfloat16", "bfloat16"),
    "mqa16-h80-bf16": Config(16, 1, 80, 8, "bfloat16", "bfloat16"),
    "h96-page1-window1": Config(4, 2, 96, 1, sliding_window=1, pages_per_row=16),
    "h256-f16-soft-cap": Config(2, 1, 256, 8, "float16", "float16", soft_cap=2.0),
    "f32-over-bf16": Config(4, 2, 64, 8, "float32", "bfloat16"),
    "window": Config(4, 2, 64, 4, sliding_window=6),
    "sinks": Config(8, 2, 64, 8, has_sinks=True),
    "int8": Config(4, 2, 64, 8, kv_dtype="int8", has_scales=True),
    "fp8": Config(8, 2, 128, 16, "bfloat16", "float8_e4m3fn", has_scales=True),
    "fp8-e5m2-unscaled": Config(4, 2, 64, 8, "bfloat16", "float8_e5m2"),
    "everything": Config(8, 4, 80, 8, "float32", "int8", 11, 3.0, True, True),
    "everything-fp8": Config(8, 4, 80, 8, "bfloat16", "float8_e4m3fn", 11, 3.0, True, True),
    # Long enough for several turns of a loop over context and several tiles of queries.
    "long": Config(4, 2, 64, 32, max_tokens=160, max_rows=4, pages_per_row=18),
    "long-page192": Config(
        2, 1, 64, 192, has_sinks=True, max_tokens=72, max_rows=3, pages_per_row=3
    ),
    "long-window": Config(
        4, 1, 64, 16, "bfloat16", "bfloat16", 100, max_tokens=160, max_rows=4, pages_per_row=36
    ),
    "long-everything-bf16": Config(
        *(12, 2, 96, 32, "bfloat16", "bfloat16", 70, 3.0, True),
        max_tokens=160,
        max_rows=4,
        pages_per_row=18,
    ),
}

# For kernels that are simulated, where an operation takes a millisecond and a program seconds: the
# same, with several to a config. Contexts of two or three blocks of 128 tokens.
SIMULATED_CONFIGS = {
    "gqa3-h64-bf16": Config(9, 3, 64, 16, "bfloat16", "bfloat16", pages_per_row=17),
    "mqa16-h80-int8-page256": Config(
        *(16, 1, 80, 256, "bfloat16", "int8"), has_scales=True, pages_per_row=2
    ),
    "mha-h96-window": Config(2, 2, 96, 16, sliding_window=140, pages_per_row=20),
    "gqa4-h128-e4m3-page128-sinks": Config(
        *(8, 2, 128, 128, "bfloat16", "float8_e4m3fn"),
        has_sinks=True,
        has_scales=True,
        pages_per_row=3,
    ),
    "gqa8-h256-e5m2-page64-soft-cap": Config(
        *(8, 1, 256, 64, "bfloat16", "float8_e5m2"), soft_cap=2.0, pages_per_row=5
    ),
    "everything": Config(8, 4, 80, 16, "float32", "int8", 11, 3.0, True, True),
    "everything-e4m3-bf16": Config(
        8, 4, 80, 16, "bfloat16", "float8_e4m3fn", 40, 3.0, True, True, pages_per_row=9
    ),
}


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """One row: tokens of this step, tokens before it, and how many of its first pages are the
    same as (and shared with) those of the row before it, where both have them full."""

    q_len: int
    context_len: int
    wants_shared_pages: int = 0


def edge_plans(config: Config) -> dict[str, list[RowPlan]]:
    """Mixes that every config must meet whatever hypothesis draws."""
    capacity = config.pages_per_row * config.page_size
    longest = min(config.max_tokens - 1, capacity)
    spread = [capacity * r // config.max_rows for r in range(config.max_rows)]
    return {
        "all padding": [],
        "rows without new tokens": [RowPlan(0, 0), RowPlan(1, 0), RowPlan(0, 3)],
        "decode, short to long": [RowPlan(1, context) for context in spread],
        "decode, long to short": [RowPlan(1, context) for context in reversed(spread)],
        "prefill from the start, full table": [RowPlan(longest, 0), RowPlan(1, capacity - 1)],
        "prefill to the end": [RowPlan(0, capacity), RowPlan(longest, capacity - longest)],
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """One call with its right effect on the cache; what is poisoned may be anything."""

    config: Config
    rows: list[oracle.Row]
    options: oracle.Options
    q: Float[np.ndarray, "T N H"]
    k: Float[np.ndarray, "T K H"]
    v: Float[np.ndarray, "T K H"]
    layer: int
    block_tables: Int[np.ndarray, "R B"]
    kv_lens: Int[np.ndarray, " R"]
    cu_q_lens: Int[np.ndarray, " R+1"]
    k_scale: Float[np.ndarray, " K"] | None
    v_scale: Float[np.ndarray, " K"] | None
    k_before: Shaped[np.ndarray, "L P S K H"]
    v_before: Shaped[np.ndarray, "L P S K H"]
    k_after: Shaped[np.ndarray, "L P S K H"]
    v_after: Shaped[np.ndarray, "L P S K H"]

    def expected(self) -> oracle.Expected:
        return oracle.attend(self.q, self.rows, self.options, self.config.unit_roundoff)


@st.composite
def row_plans(draw: st.DrawFn, config: Config) -> list[RowPlan]:
    """Rows of no, one or many new tokens, with contexts from none to a full table."""
    plans = []
    tokens_left = config.max_tokens
    capacity = config.pages_per_row * config.page_size
    for _ in range(draw(st.integers(0, config.max_rows))):
        longest = min(tokens_left, capacity)
        one, few = st.just(min(1, longest)), st.integers(0, min(2, longest))
        q_len = draw(st.one_of(one, few, st.integers(0, longest)))
        tokens_left -= q_len
        # A context that ends at, just before or just after a page, or anywhere.
        pages = draw(st.integers(0, config.pages_per_row))
        edge = st.integers(-1, 1).map(lambda d, pages=pages: pages * config.page_size + d)
        context = draw(st.one_of(edge, st.integers(0, capacity)))
        context = min(max(context, 0), capacity - q_len)
        plans.append(RowPlan(q_len, context, draw(st.integers(0, 2))))
    return plans


def make_case(config: Config, plans: list[RowPlan], seed: int) -> Case:
    """Fills in contents: numbers from `seed`, poison wherever the contract allows anything."""
    rng = np.random.default_rng(seed)
    dtype, q_dtype = config.layout.dtype, np.dtype(jnp.dtype(config.q_dtype))
    k_scale, v_scale = _scales(config, rng)
    num_tokens = sum(plan.q_len for plan in plans)

    def random(count: int, heads: int) -> Float[np.ndarray, "..."]:
        return rng.normal(size=(count, heads, config.head_dim)).astype(q_dtype)

    q, k, v = (
        _pad(random(num_tokens, heads), config.max_tokens)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    shape = (
        config.num_layers,
        config.num_pages,
        config.page_size,
        config.num_kv_heads,
        config.head_dim,
    )
    k_before, v_before = _poison(shape, dtype, rng), _poison(shape, dtype, rng)
    k_after, v_after = k_before.copy(), v_before.copy()
    layer = int(rng.integers(config.num_layers))
    tables = _place(config, plans, rng)
    cu_q_lens = np.cumsum([0] + [plan.q_len for plan in plans])

    rows: list[oracle.Row] = []
    for r, plan in enumerate(plans):
        kv_len = plan.context_len + plan.q_len
        positions = np.arange(kv_len)
        pages, slots = tables[r][positions // config.page_size], positions % config.page_size
        new = slice(cu_q_lens[r], cu_q_lens[r + 1])
        stored = []
        for before, after, x, scale in (
            (k_before, k_after, k, k_scale),
            (v_before, v_after, v, v_scale),
        ):
            context = oracle.encode(random(plan.context_len, config.num_kv_heads), scale, dtype)
            num_shared = _num_shared(config, plans, r) * config.page_size
            context[:num_shared] = before[layer, pages[:num_shared], slots[:num_shared]]
            history = np.concatenate([context, oracle.encode(x[new], scale, dtype)])
            old = slice(0, plan.context_len)
            before[layer, pages[old], slots[old]] = history[old]
            after[layer, pages, slots] = history
            stored.append(oracle.decode(history, scale))
        rows.append(oracle.Row(plan.q_len, *stored))

    return Case(
        config=config,
        rows=rows,
        options=oracle.Options(
            scale=config.head_dim**-0.5 * 1.5,
            sliding_window=config.sliding_window,
            soft_cap=config.soft_cap,
            sinks=rng.normal(size=config.num_heads).astype(np.float32)
            if config.has_sinks
            else None,
        ),
        q=q,
        k=k,
        v=v,
        layer=layer,
        block_tables=_garbage_tables(config, plans, tables, rng),
        kv_lens=_garbage_tail(
            [plan.context_len + plan.q_len for plan in plans], config.max_rows, rng
        ),
        cu_q_lens=_garbage_tail(cu_q_lens.tolist(), config.max_rows + 1, rng),
        k_scale=k_scale,
        v_scale=v_scale,
        k_before=k_before,
        v_before=v_before,
        k_after=k_after,
        v_after=v_after,
    )


def _num_shared(config: Config, plans: list[RowPlan], r: int) -> int:
    """Leading pages that row r shares with row r - 1: full before the step in both."""
    if r == 0:
        return 0
    shortest = min(plans[r].context_len, plans[r - 1].context_len)
    return min(plans[r].wants_shared_pages, shortest // config.page_size)


def _place(
    config: Config, plans: list[RowPlan], rng: np.random.Generator
) -> list[Int[np.ndarray, " B"]]:
    """Distinct pages in random order for each row, but for those that it shares."""
    free = iter(rng.permutation(np.arange(1, config.num_pages)))
    tables = []
    for r in range(len(plans)):
        table = np.array([next(free) for _ in range(config.pages_per_row)])
        num_shared = _num_shared(config, plans, r)
        if num_shared:
            table[:num_shared] = tables[r - 1][:num_shared]
        tables.append(table)
    return tables


def _garbage(shape: tuple[int, ...], rng: np.random.Generator) -> Int[np.ndarray, "..."]:
    """Any int32: the extremes, -1, small ids that look real, and random ones."""
    limits = np.iinfo(np.int32)
    anything = rng.integers(limits.min, limits.max, size=shape)
    special = rng.choice([limits.min, limits.max, -1, 0, 1, 2, 10**6], size=shape)
    return np.where(rng.random(shape) < 0.5, anything, special).astype(np.int32)


def _garbage_tail(
    live: list[int], length: int, rng: np.random.Generator
) -> Int[np.ndarray, " length"]:
    array = _garbage((length,), rng)
    array[: len(live)] = live
    return array


def _garbage_tables(
    config: Config,
    plans: list[RowPlan],
    tables: list[Int[np.ndarray, " B"]],
    rng: np.random.Generator,
) -> Int[np.ndarray, "R B"]:
    array = _garbage((config.max_rows, config.pages_per_row), rng)
    for r, (plan, table) in enumerate(zip(plans, tables, strict=True)):
        num_live = -(-(plan.context_len + plan.q_len) // config.page_size)
        array[r, :num_live] = table[:num_live]
    return array


def _pad(x: Float[np.ndarray, "t n H"], length: int) -> Float[np.ndarray, "T n H"]:
    """Appends padding tokens of NaN and infinity."""
    padded = np.full((length, *x.shape[1:]), np.nan, x.dtype)
    padded[:, :, ::3] = np.inf
    padded[: len(x)] = x
    return padded


def _poison(
    shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator
) -> Shaped[np.ndarray, "..."]:
    """NaN, or where the dtype has none, the largest numbers."""
    if dtype == np.int8:
        return rng.choice(np.array([-128, 127], np.int8), size=shape)
    return np.full(shape, np.nan, dtype)


def _scales(
    config: Config, rng: np.random.Generator
) -> tuple[Float[np.ndarray, " K"] | None, Float[np.ndarray, " K"] | None]:
    """Powers of two, different for each KV head and for K and V, that make some values saturate."""
    if not config.has_scales:
        return None, None
    base = 2.0**-5 if config.kv_dtype == "int8" else 2.0**-7
    exponents = rng.permutation(np.arange(2 * config.num_kv_heads) % 3)
    k_scale, v_scale = (base * 2.0**exponents).astype(np.float32).reshape(2, -1)
    return k_scale, v_scale
