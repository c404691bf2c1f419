"""A prompt read over one tp and decoded over another writes what one process writes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import transfer
from minipar.inference.blocks import BlockPool, Rows
from minipar.inference.paged_model import PagedModel
from minipar.tensor_parallel import tensor_parallel
from tests.model.texts import loud_model

CONFIG = ModelConfig(vocab_size=16, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32)
PROMPT, TOKENS_AFTER = [3, 1, 4, 1, 5, 9, 2], [6, 5, 3]


@given(h_kv=st.sampled_from([1, 2, 4, 8]), p=st.sampled_from([1, 2, 4]), d=st.sampled_from([1, 2, 4]))
def test_each_decode_rank_gets_each_of_its_heads_once(h_kv, p, d):
    plan = transfer.transfers(p, d, h_kv)
    for rank in range(d):
        got = [head for t in plan if t.destination == rank for head in t.heads]
        assert sorted(got) == list(transfer.heads_of(rank, d, h_kv))
    assert all(set(t.heads) <= set(transfer.heads_of(t.source, p, h_kv)) for t in plan)


def test_a_tp_that_does_not_fit_the_heads_is_named():
    with pytest.raises(ValueError, match="tp=3 and num_kv_heads=2"):
        transfer.heads_of(0, 3, 2)


def serve_apart(world, prefill_tp):
    """On a rank: logits of the tokens after the prompt on the decode side, and the bytes of cache that it sent."""
    sides = range(prefill_tp), range(prefill_tp, world.size)
    side = world.subgroup(sides[world.rank >= prefill_tp], "side")
    prefills = world.rank < prefill_tp
    pool = BlockPool(8, 3 if prefills else 2)
    paged = PagedModel(tensor_parallel(loud_model(CONFIG), side), pool)
    table = [7, 1, 4] if prefills else [5, 0, 6, 3, 1, 2]
    pool.holders = [1] * pool.num_blocks
    if prefills:
        paged([Rows(PROMPT, 0, table)])
    world.traffic.reset()
    if prefills:
        for message in transfer.send_cache(world, prefill_tp, paged, table, len(PROMPT)):
            message.wait()
    else:
        paged.load(table, transfer.recv_cache(world, prefill_tp, paged, len(PROMPT)))
    sent = world.traffic.by_kind.get("send", 0)
    return None if prefills else paged([Rows(TOKENS_AFTER, len(PROMPT), table)]), sent


def one_process():
    model = loud_model(CONFIG)
    with torch.no_grad():
        return model(torch.tensor([PROMPT + TOKENS_AFTER]))[0, len(PROMPT) :]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2)]
)
@pytest.mark.sampled(2)
def test_a_sent_cache_gives_the_logits_of_one_process(prefill_tp, decode_tp):
    ranks = minipar.run(serve_apart, prefill_tp, world_size=prefill_tp + decode_tp)
    for logits, _ in ranks[prefill_tp:]:
        torch.testing.assert_close(logits, one_process(), rtol=1e-10, atol=1e-10)
    copies = max(1, decode_tp // CONFIG.num_kv_heads)
    token_bytes = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 8
    assert sum(sent for _, sent in ranks) == len(PROMPT) * token_bytes * copies
