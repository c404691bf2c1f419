import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.inference.blocks import BlockMemory, BlockPool, blocks_for, cache_bytes
from minipar.inference.prefix import PrefixCache, block_keys


def test_llama_2_7b_keeps_half_a_mebibyte_a_token():
    config = ModelConfig(vocab_size=32000, dim=4096, num_layers=32, num_heads=32, max_seq_len=4096)
    assert cache_bytes(config, 2048, 16, 2) == 2048 << 19
    assert cache_bytes(config, 2049, 16, 2) - cache_bytes(config, 2048, 16, 2) == 16 << 19


def test_a_block_is_free_when_its_last_holder_releases_it():
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.share(block)
    with pytest.raises(RuntimeError, match=f"block {block} has 2 holders; write to a copy"):
        pool.require_writable(block)
    pool.release(block)
    pool.require_writable(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    for use in (pool.release, pool.share, pool.require_writable):
        with pytest.raises(RuntimeError, match=f"block {block} is free"):
            use(block)
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    with pytest.raises(RuntimeError, match="all 2 blocks are held"):
        pool.allocate()


@given(data=st.data(), block_size=st.integers(1, 5), num_tokens=st.integers(1, 20))
def test_tokens_are_read_in_their_order_through_any_table(data, block_size, num_tokens):
    pool = BlockPool(20, block_size)
    memory = BlockMemory(pool, 2, 3, torch.float64, torch.device("cpu"))
    table = data.draw(st.permutations(range(20)))[: blocks_for(num_tokens, block_size)]
    k, v = torch.randn(2, num_tokens, 2, 3, dtype=torch.float64)
    slots = torch.tensor([table[t // block_size] * block_size + t % block_size for t in range(num_tokens)])
    memory.write(slots, k, v)
    keys, values = memory.read(torch.tensor(table), num_tokens)
    assert torch.equal(keys[0].transpose(0, 1), k)
    assert torch.equal(values[0].transpose(0, 1), v)
    assert memory.nbytes == 20 * block_size * 2 * 2 * 3 * 8


def cached(pool, cache, tokens):
    """Let a request come and go that reads these tokens."""
    table = cache.match(tokens)
    table += [pool.allocate() for _ in range(blocks_for(len(tokens), pool.block_size) - len(table))]
    cache.keep(tokens, table)
    for block in table:
        pool.release(block)
    return table


def test_a_prefix_is_found_by_all_tokens_up_to_its_end():
    pool = BlockPool(9, 2)
    cache = PrefixCache(pool)
    table = cached(pool, cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 9]) == table[:2]
    assert cache.match([1, 2, 9, 4]) == table[:1]
    assert cache.match([9, 2, 3, 4]) == []  # its second block has the same tokens, after others
    assert cache.match([1]) == []
    assert len(cache) == 2  # the unfinished block is not kept


@given(
    a=st.lists(st.integers(0, 2), max_size=9),
    b=st.lists(st.integers(0, 2), max_size=9),
    size=st.integers(1, 4),
)
def test_keys_are_equal_where_the_texts_are_equal_so_far(a, b, size):
    for i, (key_a, key_b) in enumerate(zip(block_keys(a, size), block_keys(b, size))):
        assert (key_a == key_b) == (a[: (i + 1) * size] == b[: (i + 1) * size])


def test_the_least_recently_used_go_first_and_ends_before_beginnings():
    pool = BlockPool(6, 2)
    cache = PrefixCache(pool)
    old, new = cached(pool, cache, [1, 2, 3, 4]), cached(pool, cache, [5, 6, 7, 8])
    for block in cache.match([1, 2]):  # used again: now more recent than both of the other text
        pool.release(block)
    freed = []
    while cache.evict():
        freed.append(next(b for b in (*old, *new) if not pool.holders[b] and b not in freed))
    assert freed == [old[1], new[1], new[0], old[0]]


def test_a_block_that_a_request_holds_is_not_given_up():
    pool = BlockPool(4, 2)
    cache = PrefixCache(pool)
    cached(pool, cache, [1, 2, 3, 4])
    held = cache.match([1, 2])
    assert cache.evict()
    assert not cache.evict()
    assert cache.match([1, 2, 3, 4]) == held
    assert cache.forget(held[0])
    assert not cache.forget(held[0])
    assert pool.holders[held[0]] == 2  # the two matches
