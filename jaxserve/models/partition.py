"""How attention heads and the MLP are cut into equal parts, one for each device of a mesh."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jaxserve.config import ModelInfo


class Partition(NamedTuple):
    """Where a checkpoint's heads and MLP neurons lie in parameter arrays that are cut in parts.

    A place holds the number of a head of the checkpoint, or -1: a dummy, whose weights are zeros
    and which adds nothing. Parts are equal and follow each other.

    kv_heads: a KV head may have several places, each with its share of the query heads.
    q_heads: the query heads that belong to each place of a KV head.
    mlp: neurons, dummies included; those come last.
    """

    num_parts: int
    kv_heads: Int[np.ndarray, " K"]
    q_heads: Int[np.ndarray, "K G"]
    mlp: int


def partition(info: ModelInfo, num_parts: int) -> Partition:
    """Each KV head once where there is one for every part, else as often as all of them can be."""
    num_kv_heads, copies = info.num_kv_heads, max(1, num_parts // info.num_kv_heads)
    places = _round_up(num_kv_heads * copies, num_parts)
    group = info.num_heads // num_kv_heads
    share = -(-group // copies)
    kv_heads = np.full(places, -1)
    q_heads = np.full((places, share), -1)
    for place in range(num_kv_heads * copies):
        head, copy = divmod(place, copies)
        kv_heads[place] = head
        mine = np.arange(head * group, (head + 1) * group)[copy * share : (copy + 1) * share]
        q_heads[place, : len(mine)] = mine
    return Partition(num_parts, kv_heads, q_heads, _round_up(info.intermediate_size, num_parts))


def place_heads(
    heads: Shaped[np.ndarray, "heads ..."], places: Int[np.ndarray, "*places"]
) -> Shaped[np.ndarray, "..."]:
    """The heads of `places` in their order, [*places, ...]; zeros for a dummy."""
    if np.array_equal(places.ravel(), np.arange(len(heads))):
        return heads.reshape(*places.shape, *heads.shape[1:])
    placed = heads[places]
    placed[places < 0] = 0
    return placed


def pad_to(
    array: Shaped[np.ndarray, "..."], axis: int, length: int, padded: int
) -> Shaped[np.ndarray, "..."]:
    """`array`, whose `axis` should have `length` entries, with zeros up to `padded` at its end."""
    if padded == length:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padded - length)
    return np.pad(array, widths)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
