"""Block tables: gives requests KV blocks, finds the blocks of known prefixes, takes blocks back."""

from collections.abc import Iterable, Sequence

from jaxserve.engine.block_pool import BlockPool
from jaxserve.engine.request import Request, extend_block_hashes


class KVCacheManager:
    """The KV cache as the scheduler sees it. Only full blocks are shared.

    A block becomes shareable when `cache_blocks` is called after the step that fills it has been
    planned: steps planned later run later, so whoever finds it reads what that step wrote.
    """

    def __init__(self, *, num_kv_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        assert block_size > 0
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._pool = BlockPool(num_kv_blocks)

    @property
    def num_kv_blocks(self) -> int:
        """All blocks, the padding block 0 included."""
        return self._pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._pool.num_used

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of `request`'s tokens already; takes no reference.

        They never hold all tokens: the last one must be computed to sample the next from. None for
        a request that needs the whole prompt computed.
        """
        if not self.enable_prefix_caching or request.needs_whole_prompt:
            return []
        most = (len(request.token_ids) - 1) // self.block_size
        extend_block_hashes(request, self.block_size, most)
        return self._pool.find(request.block_hashes[:most])

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed_blocks: Sequence[int] = (),
        num_tokens_to_fit: int = 0,
    ) -> list[int] | None:
        """Makes room for the next `num_new_tokens` tokens; returns the blocks added to the table.

        computed_blocks: what `get_computed_blocks` found, for a request that holds no blocks yet;
          they become the table's beginning and num_computed_tokens counts their tokens.
        num_tokens_to_fit: in addition, as many blocks must be free as that many tokens need in all.
        Returns None, changing nothing, when there are too few free blocks.
        """
        pool, table = self._pool, request.block_ids
        num_held = len(table) + len(computed_blocks)
        num_computed = request.num_computed_tokens + len(computed_blocks) * self.block_size
        num_needed = self.num_blocks_for(num_computed + num_new_tokens) - num_held
        num_to_fit = max(num_needed, self.num_blocks_for(num_tokens_to_fit) - num_held)
        if num_to_fit > pool.num_free - pool.num_unreferenced(computed_blocks):
            return None
        if computed_blocks:
            assert not table, request
            pool.acquire(computed_blocks)
            table += computed_blocks
            request.num_computed_tokens = num_computed
            request.num_registered_blocks = len(computed_blocks)
        new_blocks = pool.allocate(num_needed) if num_needed > 0 else []
        table += new_blocks
        return new_blocks

    def count_prefix_query(self, request: Request) -> None:
        """Counts the tokens asked for and found, for a request that was just admitted."""
        if self.enable_prefix_caching and not request.needs_whole_prompt:
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_computed_tokens

    def cache_blocks(self, request: Request) -> None:
        """Makes `request`'s blocks that are full of known, planned tokens findable for others."""
        if not self.enable_prefix_caching:
            return
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_known // self.block_size
        if num_full <= request.num_registered_blocks:
            return
        extend_block_hashes(request, self.block_size, num_full)
        for idx in range(request.num_registered_blocks, num_full):
            self._pool.register(request.block_ids[idx], request.block_hashes[idx])
        request.num_registered_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes all of `request`'s blocks back; what they hold stays findable until reused."""
        self.cache_blocks(request)
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets every known prefix; False, changing nothing, while requests hold blocks."""
        return self._pool.forget_all()

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Asserts that the pool is consistent and that `requests` hold exactly its used blocks."""
        requests = list(requests)
        self._pool.check_invariants(request.block_ids for request in requests)
        for request in requests:
            num_slots = len(request.block_ids) * self.block_size
            assert request.num_computed_tokens <= num_slots, request
            known = min(request.num_computed_tokens, request.num_tokens)
            assert request.num_registered_blocks * self.block_size <= known, request
            assert len(set(request.block_ids)) == len(request.block_ids), request
