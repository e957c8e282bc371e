"""Rotary positions (Su et al., 2021): their tables, and the rotation where XLA does it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class RopeTables(NamedTuple):
    """Cosine and sine of the angle of each of the H / 2 pairs, at each token's position. A pytree;
    its leaves are arrays, or what stands for arrays in JAX."""

    cos: Any  # Float32[Array, "T h"]
    sin: Any  # Float32[Array, "T h"]


def apply_rope(x: Float[Array, "T N H"], tables: RopeTables) -> Float[Array, "T N H"]:
    """x, each pair (i, i + H / 2) of which is rotated by its angle, as in Hugging Face weights."""
    cos, sin = tables.cos[:, None], tables.sin[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def unpack_and_rotate(
    qkv: Float[Array, "T K C H"], tables: RopeTables
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """q, k and v of what `attend_packed` takes."""
    q = qkv[:, :, :-2].reshape(len(qkv), -1, qkv.shape[3])
    return apply_rope(q, tables), apply_rope(qkv[:, :, -2], tables), qkv[:, :, -1]
