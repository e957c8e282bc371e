"""The KV blocks: who holds them, which are free and in which order they are reused, which contents
they are known to have."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1; block 0 is padding and never given out.

    A block is free (no references, in the free queue) or referenced by one or more block tables.
    A registered block, free or referenced, is full and its contents are named by a hash; equal
    contents may be registered more than once, the earliest registered is found. A free block keeps
    its hash until it is given out again. Free blocks without a hash are given out first, then the
    least recently freed.
    """

    def __init__(self, num_blocks: int):
        assert num_blocks > 1, f"{num_blocks} KV blocks, of which one is padding"
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._found: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that block tables hold."""
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, num: int) -> list[int]:
        """Gives out `num` blocks with one reference each, forgetting what they contained.

        The caller has seen that `num_free` is enough.
        """
        assert num <= len(self._free), (num, len(self._free))
        pop, hashes, ref_counts = self._free.popitem, self._hashes, self._ref_counts
        block_ids = []
        for _ in range(num):
            block_id, _ = pop(last=False)
            if hashes[block_id] is not None:
                self._unregister(block_id)
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def find(self, block_hashes: Iterable[bytes]) -> list[int]:
        """The blocks with these contents, up to the first that is not there; takes no reference."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._found.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of `block_ids` are in the free queue."""
        return sum(not self._ref_counts[block_id] for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each, taking it out of the free queue if it is there."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference each of a block table.

        The table's end enters the free queue first: the beginning of a prefix lives longest.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released once too often"
            self._ref_counts[block_id] = count
            if not count:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Says that the referenced, full block `block_id` holds the contents `block_hash` names."""
        assert self._ref_counts[block_id] and self._hashes[block_id] is None, block_id
        self._hashes[block_id] = block_hash
        if self._found.setdefault(block_hash, block_id) != block_id:
            self._duplicates.setdefault(block_hash, []).append(block_id)

    def forget_all(self) -> bool:
        """Forgets all contents if no block is referenced; returns whether it did."""
        if self.num_used:
            return False
        self._hashes = [None] * self.num_blocks
        self._found.clear()
        self._duplicates.clear()
        return True

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Asserts that the pool is consistent and that `block_tables` are its references."""
        expected = Counter(block_id for table in block_tables for block_id in table)
        for block_id, count in enumerate(self._ref_counts):
            assert count == expected[block_id], (block_id, count, expected[block_id])
            assert (block_id in self._free) == (count == 0 and block_id != NULL_BLOCK), block_id
        registered: dict[bytes, list[int]] = {}
        for block_id, block_hash in enumerate(self._hashes):
            if block_hash is not None:
                registered.setdefault(block_hash, []).append(block_id)
        findable = {
            block_hash: sorted([block_id, *self._duplicates.get(block_hash, [])])
            for block_hash, block_id in self._found.items()
        }
        assert registered == findable, (registered, findable)
        assert all(self._duplicates.values()) and self._duplicates.keys() <= self._found.keys()
        assert self._hashes[NULL_BLOCK] is None

    def _unregister(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        self._hashes[block_id] = None
        duplicates = self._duplicates.get(block_hash)
        if not duplicates:
            del self._found[block_hash]
            return
        if self._found[block_hash] == block_id:
            self._found[block_hash] = duplicates.pop(0)
        else:
            duplicates.remove(block_id)
        if not duplicates:
            del self._duplicates[block_hash]
