"""How keys and values lie in memory on each platform, and how to reach them without knowing.

The engine sees a cache only as an opaque pytree that it allocates from `KVCacheLayout.shape` and
passes through donated calls. Kernels written for one platform know its axis order; everything else
goes through the methods below, which speak of the logical axes [L, P, S, K, H]: layers, pages,
slots of a page, KV heads, head dim.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int, Shaped

# Physical axis order on each platform, in the letters of the logical axes. X: K and H in one axis,
# heads padded to `padded_head_dim` and their sum to a multiple of 128, as a TPU's tiles have 128
# lanes and anything narrower is padded, and its cache copied, by XLA.
_AXES = {"cpu": "LPSKH", "gpu": "LPSKH", "tpu": "LPSX"}
_LOGICAL = "LPSKH"
_LANES = 128

PLATFORMS = tuple(_AXES)
_FLOAT_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
QUANTIZED_DTYPES = tuple(jnp.dtype(d) for d in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2))
CACHE_DTYPES = _FLOAT_DTYPES + QUANTIZED_DTYPES


class KVCache(NamedTuple):
    """Keys and values of all layers; the axis order belongs to the layout. A pytree.

    Its leaves are arrays, or what stands for arrays in JAX: `jax.ShapeDtypeStruct`, shardings.
    """

    k: Any
    v: Any


@dataclasses.dataclass(frozen=True)
class KVCacheLayout:
    """The memory layout of one platform's KV cache; hashable, so it can be a static argument.

    Page 0 is the null page: it belongs to no row, and padding may be written to it. Where a mesh
    splits the KV heads, this is the layout of one device's share: the array of all has
    `heads_axis` that many times as long.
    """

    platform: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype
    page_size: int
    axes: str

    @classmethod
    def for_platform(
        cls,
        platform: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike,
        page_size: int,
    ) -> "KVCacheLayout":
        """The layout of `platform` ("cpu", "gpu" or "tpu") with pages of `page_size` tokens.

        Raises:
            ValueError: no such platform, a dtype that no cache can hold, or a count below 1.
        """
        if platform not in _AXES:
            raise ValueError(f"platform {platform!r} is not one of {', '.join(PLATFORMS)}")
        if jnp.dtype(dtype) not in CACHE_DTYPES:
            names = ", ".join(d.name for d in CACHE_DTYPES)
            raise ValueError(f"KV cache dtype {jnp.dtype(dtype).name} is not one of {names}")
        counts = dict(
            num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
        )
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}, must be at least 1")
        return cls(platform, dtype=jnp.dtype(dtype), axes=_AXES[platform], **counts)

    @property
    def heads_axis(self) -> int:
        """The axis of the arrays that holds the KV heads, K or X."""
        return self.axes.index("X" if "X" in self.axes else "K")

    @property
    def padded_head_dim(self) -> int:
        """Lanes of a head in axis X: H, or where neither divides the other, H padded to 128s."""
        divides = self.head_dim % _LANES == 0 or _LANES % self.head_dim == 0
        return self.head_dim if divides else _round_up(self.head_dim, _LANES)

    @property
    def token_width(self) -> int:
        """Length of axis X."""
        return _round_up(self.num_kv_heads * self.padded_head_dim, _LANES)

    @property
    def storage_dtype(self) -> np.dtype:
        """The dtype of the cache's arrays: `dtype`, but uint8 for the bits of a float8.

        XLA on CPUs computes on float8 by converting the operands, here the whole cache, to
        float16, which would copy it in every step and change the bits of NaNs.
        """
        is_float8 = self.dtype.itemsize == 1 and self.dtype != jnp.int8
        return jnp.dtype(jnp.uint8) if is_float8 else self.dtype

    @property
    def bytes_per_page(self) -> int:
        """Device bytes one page costs, K and V of all layers together."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.shape(1))

    def shape(self, num_pages: int) -> KVCache:
        """Shape and dtype of the arrays of a cache of `num_pages` pages, null page included."""
        sizes = {
            "L": self.num_layers,
            "P": num_pages,
            "S": self.page_size,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "X": self.token_width,
        }
        leaf = jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in self.axes), self.storage_dtype)
        return KVCache(leaf, leaf)

    def num_pages(self, kv_cache: KVCache) -> int:
        """Pages of `kv_cache`, the null page included."""
        return kv_cache.k.shape[self.axes.index("P")]

    def read_tokens(
        self,
        kv_cache: KVCache,
        layer: int | Int[Array, ""],
        pages: Int[Array, " C"],
        slots: Int[Array, " C"],
    ) -> tuple[Shaped[Array, "C K H"], Shaped[Array, "C K H"]]:
        """K and V, still encoded, of C token places; `pages` and `slots` must be in range."""
        index = _token_index(self.axes, layer, pages, slots)
        return split_heads(self, kv_cache.k[index]), split_heads(self, kv_cache.v[index])

    def write_tokens(
        self,
        kv_cache: KVCache,
        layer: int | Int[Array, ""],
        pages: Int[Array, " T"],
        slots: Int[Array, " T"],
        k: Shaped[Array, "T K H"],
        v: Shaped[Array, "T K H"],
    ) -> KVCache:
        """Stores encoded K and V of T tokens; drops those whose page is num_pages."""
        index = _token_index(self.axes, layer, pages, slots)
        return KVCache(
            kv_cache.k.at[index].set(join_heads(self, k), mode="drop"),
            kv_cache.v.at[index].set(join_heads(self, v), mode="drop"),
        )

    def encode(
        self, values: Float[Array, "T K H"], scale: Float[Array, " K"] | None
    ) -> Shaped[Array, "T K H"]:
        """What the cache's arrays hold for `values`.

        That is values / scale in float32, rounded to the nearest even and saturated at the largest
        finite value of a quantized dtype. Float8 comes as the bits: see `storage_dtype`.
        """
        if self.dtype not in QUANTIZED_DTYPES:
            return values.astype(self.dtype)
        scaled = values.astype(jnp.float32)
        if scale is not None:
            scaled = scaled / scale[:, None]
        if self.dtype == jnp.int8:
            return jnp.clip(jnp.round(scaled), -128, 127).astype(self.dtype)
        largest = float(jnp.finfo(self.dtype).max)
        saturated = jnp.clip(scaled, -largest, largest).astype(self.dtype)
        return jax.lax.bitcast_convert_type(saturated, self.storage_dtype)

    def decode(
        self, elements: Shaped[Array, "*C K H"], scale: Float[Array, " K"] | None
    ) -> Float32[Array, "*C K H"]:
        """The values, stored number * scale, that elements of the cache's arrays stand for."""
        values = jax.lax.bitcast_convert_type(elements, self.dtype).astype(jnp.float32)
        return values if scale is None else values * scale[:, None]


def zeros(layout: KVCacheLayout, num_pages: int) -> KVCache:
    """An empty cache on the default device."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout.shape(num_pages))


def join_heads(layout: KVCacheLayout, x: Shaped[Array, "*C K H"]) -> Shaped[Array, "..."]:
    """Tokens as they lie in the arrays: [*C, X] with zeros as padding, or `x` itlayout."""
    if "X" not in layout.axes:
        return x
    # As integers: XLA's CPU pads bfloat16 by way of float32, which changes the bits of NaNs.
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    batch = ((0, 0),) * (x.ndim - 2)
    bits = jnp.pad(bits, (*batch, (0, 0), (0, layout.padded_head_dim - layout.head_dim)))
    bits = bits.reshape(*x.shape[:-2], -1)
    bits = jnp.pad(bits, (*batch, (0, layout.token_width - bits.shape[-1])))
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def split_heads(layout: KVCacheLayout, x: Shaped[Array, "..."]) -> Shaped[Array, "*C K H"]:
    """The inverse of `join_heads`."""
    if "X" not in layout.axes:
        return x
    x = x[..., : layout.num_kv_heads * layout.padded_head_dim]
    x = x.reshape(*x.shape[:-1], layout.num_kv_heads, layout.padded_head_dim)
    return x[..., : layout.head_dim]


def to_logical(
    layout: KVCacheLayout, kv_cache: KVCache
) -> tuple[Shaped[Array, "L P S K H"], Shaped[Array, "L P S K H"]]:
    """K and V in the layout's dtype, not scaled, with the logical axes; may copy the cache."""

    def logical(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        array = split_heads(layout, array)
        axes = layout.axes.replace("X", "KH")
        array = jnp.transpose(array, [axes.index(axis) for axis in _LOGICAL])
        return jax.lax.bitcast_convert_type(array, layout.dtype)

    return logical(kv_cache.k), logical(kv_cache.v)


def from_logical(
    layout: KVCacheLayout, k: Shaped[Array, "L P S K H"], v: Shaped[Array, "L P S K H"]
) -> KVCache:
    """The inverse of `to_logical`; K and V must already have the layout's dtype."""
    if k.dtype != layout.dtype or v.dtype != layout.dtype:
        raise ValueError(f"K is {k.dtype}, V is {v.dtype}, the layout stores {layout.dtype}")

    def physical(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        axes = layout.axes.replace("X", "KH")
        array = jnp.transpose(array, [_LOGICAL.index(axis) for axis in axes])
        array = jax.lax.bitcast_convert_type(array, layout.storage_dtype)
        return join_heads(layout, array)

    return KVCache(physical(k), physical(v))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _token_index(
    axes: str, layer: int | Int[Array, ""], pages: Int[Array, " T"], slots: Int[Array, " T"]
) -> tuple[int | slice | Int[Array, "..."], ...]:
    """An index into a physical array that selects its tokens, [T, K, H] or [T, X]."""
    where = {"L": layer, "P": pages, "S": slots}
    return tuple(where.get(axis, slice(None)) for axis in axes)
