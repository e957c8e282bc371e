"""Blocks, block tables and block hashes by hand-made cases."""

import hashlib
import struct

import msgspec
import pytest

from jaxserve.engine.block_pool import BlockPool
from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import Request, extend_block_hashes, hash_prompt_blocks
from jaxserve.messages import SamplingParams

GOLDEN_HASHES = ["c92e9fb3a8618c273b6e67e390edbb2d", "c970d2ef0507041055de528d2ce968e6"]


def make_request(tokens: list[int], **fields) -> Request:
    sampling = SamplingParams(max_tokens=8)
    return Request("r", list(tokens), len(tokens), sampling, **fields)


def fill(kv: KVCacheManager, tokens: list[int], **fields) -> Request:
    """A request whose tokens are all computed and whose full blocks are registered."""
    request = make_request(tokens, **fields)
    computed_blocks = kv.get_computed_blocks(request)
    num_new = len(tokens) - len(computed_blocks) * kv.block_size
    assert kv.allocate_slots(request, num_new, computed_blocks=computed_blocks) is not None
    request.num_computed_tokens = len(tokens)
    kv.cache_blocks(request)
    return request


# --- BlockPool ---


def test_allocates_every_block_but_the_null_block():
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_free_blocks_are_reused_nameless_first_then_least_recently_freed_tail_first():
    pool = BlockPool(8)
    old, new, nameless = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    for block in old + new:
        pool.register(block, bytes([block]))
    pool.release(old)
    pool.release(new)
    pool.release(nameless)
    pool.check_invariants([])
    assert pool.allocate(7) == [*nameless, 6, 7, *reversed(old), *reversed(new)]


def test_a_found_block_leaves_the_middle_of_the_queue():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.release(blocks)
    assert pool.find([bytes([2]), bytes([3]), b"no", bytes([1])]) == [2, 3]
    pool.acquire([2, 3])
    pool.check_invariants([[2, 3]])
    assert pool.num_unreferenced([1, 2, 3, 4]) == 2
    assert pool.allocate(2) == [4, 1]
    pool.check_invariants([[2, 3], [4, 1]])
    assert pool.find([bytes([1])]) == pool.find([bytes([4])]) == []


def test_shared_blocks_are_free_after_the_last_release():
    pool = BlockPool(3)
    pool.allocate(1)
    pool.register(1, b"x")
    pool.acquire([1])
    pool.release([1])
    pool.check_invariants([[1]])
    assert pool.num_free == 1
    pool.release([1])
    assert pool.num_free == 2
    with pytest.raises(AssertionError):
        pool.release([1])


@pytest.mark.parametrize("evict_first", [1, 2, 3])
def test_equal_contents_are_found_until_the_last_copy_is_reused(evict_first: int):
    pool = BlockPool(4)
    pool.allocate(3)
    for block in (1, 2, 3):
        pool.register(block, b"same")
    assert pool.find([b"same"]) == [1]
    left = [1, 2, 3]
    for block in (evict_first, *({1, 2, 3} - {evict_first})):
        pool.release([block])
        assert pool.allocate(1) == [block]
        left.remove(block)
        pool.check_invariants([[1, 2, 3]])
        assert pool.find([b"same"]) == left[:1]


def test_forgets_all_contents_only_while_no_block_is_held():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.register(1, b"x")
    pool.register(2, b"x")
    pool.release([2])
    assert not pool.forget_all()
    assert pool.find([b"x"]) == [1]
    pool.release([1])
    assert pool.forget_all()
    assert pool.find([b"x"]) == []
    pool.check_invariants([])


def test_invariants_notice_a_lost_block_and_a_wrong_table():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check_invariants([[1], [2]])
    for tables in ([[1]], [[1, 2], [2]], [[1, 2, 3]], [[0, 1, 2]]):
        with pytest.raises(AssertionError):
            pool.check_invariants(tables)


# --- KVCacheManager ---


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (9, 3)])
def test_a_table_covers_exactly_its_tokens(num_tokens: int, num_blocks: int):
    kv = KVCacheManager(num_kv_blocks=8, block_size=4)
    request = make_request([1] * num_tokens)
    assert kv.allocate_slots(request, num_tokens) == list(range(1, num_blocks + 1))
    assert kv.allocate_slots(request, num_tokens) == []
    assert kv.num_used_blocks == num_blocks


def test_too_few_blocks_change_nothing():
    kv = KVCacheManager(num_kv_blocks=4, block_size=4)
    holder = fill(kv, [1, 2, 3, 4, 5])
    kv.free(holder)
    request = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    computed = kv.get_computed_blocks(request)
    assert computed == [1]
    assert kv.allocate_slots(request, 9, computed_blocks=computed) is None
    assert kv.allocate_slots(request, 1, computed_blocks=computed, num_tokens_to_fit=13) is None
    assert (request.block_ids, request.num_computed_tokens, kv.num_used_blocks) == ([], 0, 0)
    kv.check_invariants([])
    assert kv.allocate_slots(request, 1, computed_blocks=computed, num_tokens_to_fit=12) == [2]
    assert (request.block_ids, request.num_computed_tokens) == ([1, 2], 4)
    kv.check_invariants([request])


def test_at_least_one_token_is_left_to_compute():
    kv = KVCacheManager(num_kv_blocks=20, block_size=4)
    fill(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    for num_tokens, num_found in [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)]:
        request = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][:num_tokens])
        assert len(kv.get_computed_blocks(request)) == num_found, num_tokens


def test_prefixes_are_shared_with_equal_salt_and_lora_only():
    kv = KVCacheManager(num_kv_blocks=40, block_size=2)
    tokens = [1, 2, 3, 4, 5]
    variants = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_name": "a"}]
    tables = [fill(kv, tokens, **variant).block_ids for variant in variants]
    assert len({block for table in tables for block in table}) == 12
    for variant, table in zip(variants, tables, strict=True):
        assert kv.get_computed_blocks(make_request(tokens, **variant)) == table[:2]
    assert kv.get_computed_blocks(make_request([9, 2, 3, 4, 5])) == []
    assert kv.get_computed_blocks(make_request([1, 2, 3, 9, 5])) == tables[0][:1]


def test_only_full_blocks_of_known_computed_tokens_are_registered():
    kv = KVCacheManager(num_kv_blocks=9, block_size=2)
    request = make_request([1, 2, 3, 4, 5, 6])
    probe = make_request([1, 2, 3, 4, 5, 6, 7])
    kv.allocate_slots(request, 8)
    for num_computed, num_found in [(1, 0), (3, 1), (4, 2), (7, 3), (8, 3)]:
        request.num_computed_tokens = num_computed
        kv.cache_blocks(request)
        assert len(kv.get_computed_blocks(probe)) == num_found
    request.token_ids += [7, 8]
    kv.cache_blocks(request)
    assert kv.get_computed_blocks(make_request([1, 2, 3, 4, 5, 6, 7, 8, 9])) == [1, 2, 3, 4]


def test_freed_blocks_stay_findable_until_they_are_reused():
    kv = KVCacheManager(num_kv_blocks=5, block_size=2)
    kv.free(fill(kv, [1, 2, 3, 4, 5]))
    probe = make_request([1, 2, 3, 4, 5])
    assert kv.get_computed_blocks(probe) == [1, 2]
    fill(kv, [7, 8, 9])
    assert kv.get_computed_blocks(probe) == [1, 2]
    other = make_request([6])
    kv.allocate_slots(other, 1)
    assert kv.get_computed_blocks(probe) == [1]


def test_without_prefix_caching_nothing_is_found():
    kv = KVCacheManager(num_kv_blocks=9, block_size=2, enable_prefix_caching=False)
    request = fill(kv, [1, 2, 3, 4, 5])
    assert kv.get_computed_blocks(make_request([1, 2, 3, 4, 5])) == []
    kv.free(request)
    assert kv.get_computed_blocks(make_request([1, 2, 3, 4, 5])) == []
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (0, 0)
    assert request.block_hashes == []


# --- hashes ---


def test_hash_chain_is_blake2b_over_parent_and_int32_tokens():
    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    root = digest(msgspec.msgpack.encode([2, "salt", None]))
    first = digest(root + struct.pack("<2i", 1, 2))
    second = digest(first + struct.pack("<2i", 150_000, 4))
    assert hash_prompt_blocks([1, 2, 150_000, 4, 5], 2, "salt") == [first, second]


def test_hashes_are_the_same_in_every_process():
    hashes = hash_prompt_blocks(list(range(32)), 16)
    assert [block_hash.hex() for block_hash in hashes] == GOLDEN_HASHES


def test_every_input_changes_the_hash():
    base = ([1, 2, 3, 4], 2, None, None)
    others = [
        ([9, 2, 3, 4], 2, None, None),
        ([1, 2, 3, 9], 2, None, None),
        ([1, 2, 3, 4], 4, None, None),
        ([1, 2, 3, 4], 2, "a", None),
        ([1, 2, 3, 4], 2, None, "a"),
        ([1, 2, 3, 4], 2, "", None),
        ([1, 2, 3, 4], 2, "a", "a"),
    ]
    last = [hash_prompt_blocks(*args)[-1] for args in [base, *others]]
    assert len(set(last)) == len(last)
    assert {len(block_hash) for block_hash in last} == {16}


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
def test_extending_equals_hashing_at_once(num_prompt_tokens: int):
    tokens = list(range(100, 117))
    request = make_request(tokens[:num_prompt_tokens], cache_salt="s", lora_name="l")
    request.block_hashes = hash_prompt_blocks(request.token_ids, 4, "s", "l")
    request.token_ids += tokens[num_prompt_tokens:]
    for num_blocks in (1, 1, 3, 4):
        extend_block_hashes(request, 4, num_blocks)
    assert request.block_hashes == hash_prompt_blocks(tokens, 4, "s", "l")
    with pytest.raises(AssertionError):
        extend_block_hashes(request, 4, 5)
